// Yahoo benchmark on integers: views per campaign and window of 10 s. Bound by memory: 13 bytes a row.
#include "common.h"

enum { ADS = 1000, ROOM = 1024, CAMPAIGNS = 100, WINDOW_MS = 10000, LANES = 4, VIEW = 0 };

typedef struct {
    const int64_t *time; const int32_t *ad; const int8_t *type; int64_t n;
    int64_t base, windows;
    uint32_t *counts[MAX_THREADS];  // of each part: [window][lane][ad]
} yahoo_args;

static void count_part(void *raw, int part, int parts) {
    yahoo_args *a = raw;
    uint32_t *counts = a->counts[part] = reserve((size_t)a->windows * LANES * ROOM * sizeof *counts);
    int64_t end = a->n * (part + 1) / parts;
    for (int64_t i = a->n * part / parts, stop; i < end; i = stop) {
        stop = i + BLOCK < end ? i + BLOCK : end;
        int64_t first = a->time[i], last = first;
        for (int64_t k = i; k < stop; k++) {
            first = a->time[k] < first ? a->time[k] : first;
            last = a->time[k] > last ? a->time[k] : last;
        }
        uint64_t window = (uint64_t)(first - a->base) / WINDOW_MS;
        if (window == (uint64_t)(last - a->base) / WINDOW_MS) {
            // The usual block: one window. Neighbouring rows use different lanes, so that no count waits for a store.
            uint32_t *c = counts + window * LANES * ROOM;
            int64_t k = i;
            for (; k + LANES <= stop; k += LANES)
                for (int lane = 0; lane < LANES; lane++) c[lane * ROOM + a->ad[k + lane]] += a->type[k + lane] == VIEW;
            for (; k < stop; k++) c[a->ad[k]] += a->type[k] == VIEW;
        } else {
            for (int64_t k = i; k < stop; k++) {
                window = (uint64_t)(a->time[k] - a->base) / WINDOW_MS;
                counts[window * LANES * ROOM + a->ad[k]] += a->type[k] == VIEW;
            }
        }
    }
}

// out[windows][CAMPAIGNS] += views; window w starts at base + w * WINDOW_MS. Ads become campaigns at the very end.
void yahoo(const int64_t *time, const int32_t *ad, const int8_t *type, int64_t n, const int32_t *campaign_of,
           int64_t base, int64_t windows, int64_t *out, int parts) {
    yahoo_args a = {.time = time, .ad = ad, .type = type, .n = n, .base = base, .windows = windows};
    in_parallel(count_part, &a, parts);
    for (int part = 0; part < parts; part++) {
        for (int64_t w = 0; w < windows; w++)
            for (int lane = 0; lane < LANES; lane++)
                for (int k = 0; k < ADS; k++)
                    out[w * CAMPAIGNS + campaign_of[k]] += a.counts[part][(w * LANES + lane) * ROOM + k];
        release(a.counts[part], (size_t)windows * LANES * ROOM * sizeof *a.counts[part]);
    }
}
