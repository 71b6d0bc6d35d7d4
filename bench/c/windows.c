// Sliding windows: count per key, 10 s every 2 s. Rows come almost in order: none is later than LAG_MS.
//
// A key gets a dense number at its first row; an open slice is an array of counts by that number. A row costs one
// probe and one increment in an array that fits L2; closing a window adds five arrays, which gcc vectorizes.
#include "common.h"

enum { SLICE_MS = 2000, SLICES = 5, RING = 8, LAG_MS = 100, AHEAD = 12 };

typedef struct { int64_t key; int64_t number; } slot;  // number 0: empty; else the key's number + 1

typedef struct {
    const int64_t *key, *time; int64_t n, base;
    int64_t *out_key, *out_start, *out_count; int64_t room;  // a part writes to its share of `room` rows
    int64_t *rows;                                           // rows written, a part each
} sliding_args;

typedef struct {
    slot *slots; uint64_t capacity;
    int64_t *keys; int64_t key_count;
    uint32_t *counts[RING];
} key_table;

static void insert_keys(key_table *t) {
    for (int64_t i = 0; i < t->key_count; i++) {
        uint64_t s = mix(t->keys[i]) & (t->capacity - 1);
        while (t->slots[s].number) s = (s + 1) & (t->capacity - 1);
        t->slots[s] = (slot){t->keys[i], i + 1};
    }
}

static inline int64_t number_of(key_table *t, int64_t key) {
    for (uint64_t s = mix(key) & (t->capacity - 1);; s = (s + 1) & (t->capacity - 1)) {
        slot *found = &t->slots[s];
        if (found->key == key && found->number) return found->number - 1;
        if (!found->number) {
            t->keys[t->key_count++] = key;
            *found = (slot){key, t->key_count};
            return t->key_count - 1;
        }
    }
}

static int64_t close_window(key_table *t, sliding_args *a, int64_t last_slice, int64_t out) {
    const uint32_t *c[SLICES];
    for (int s = 0; s < SLICES; s++) c[s] = t->counts[(last_slice - s) & (RING - 1)];
    int64_t start = a->base + (last_slice - SLICES + 1) * SLICE_MS;
    for (int64_t i = 0; i < t->key_count; i++) {
        uint32_t count = c[0][i] + c[1][i] + c[2][i] + c[3][i] + c[4][i];
        a->out_key[out] = t->keys[i];
        a->out_start[out] = start;
        a->out_count[out] = count;
        out += count != 0;
    }
    memset(t->counts[(last_slice - SLICES + 1) & (RING - 1)], 0, t->key_count * sizeof(uint32_t));
    return out;
}

static void slide_part(void *raw, int part, int parts) {
    sliding_args *a = raw;
    key_table t = {.capacity = 1 << 14};
    t.slots = reserve(t.capacity * sizeof(slot));
    t.keys = reserve(a->n * sizeof(int64_t));
    for (int r = 0; r < RING; r++) t.counts[r] = reserve(a->n * sizeof(uint32_t));

    int64_t own_key[BLOCK], own_time[BLOCK];
    int64_t out = a->room / parts * part, before = out, latest = a->time[0];
    int64_t next = (a->time[0] - 2 * LAG_MS - a->base) / SLICE_MS;  // the first slice that is still open
    for (int64_t i = 0; i < a->n; i += BLOCK) {
        int64_t m = a->n - i < BLOCK ? a->n - i : BLOCK;
        const int64_t *key = a->key + i, *time = a->time + i;
        int64_t first = time[0], last = time[0];
        for (int64_t k = 0; k < m; k++) {
            first = time[k] < first ? time[k] : first;
            last = time[k] > last ? time[k] : last;
        }
        latest = last > latest ? last : latest;
        if (parts > 1) {  // each part takes the keys that are its own
            int64_t kept = 0;
            for (int64_t k = 0; k < m; k++) {
                own_key[kept] = key[k];
                own_time[kept] = time[k];
                kept += (int)((mix(key[k]) >> 40) % (uint32_t)parts) == part;
            }
            m = kept, key = own_key, time = own_time;
        }
        while ((t.key_count + m) * 2 > (int64_t)t.capacity) {
            release(t.slots, t.capacity * sizeof(slot));
            t.capacity *= 2;
            t.slots = reserve(t.capacity * sizeof(slot));
            insert_keys(&t);
        }
        int64_t slice = (first - a->base) / SLICE_MS, is_one = slice == (last - a->base) / SLICE_MS;
        for (int64_t k = 0; k < m; k++) {
            if (k + AHEAD < m) __builtin_prefetch(&t.slots[mix(key[k + AHEAD]) & (t.capacity - 1)]);
            int64_t s = is_one ? slice : (int64_t)((uint64_t)(time[k] - a->base) / SLICE_MS);
            t.counts[s & (RING - 1)][number_of(&t, key[k])]++;
        }
        for (int64_t open = (latest - LAG_MS - a->base) / SLICE_MS; next < open; next++)
            out = close_window(&t, a, next, out);
    }
    for (int64_t end = (latest - a->base) / SLICE_MS + SLICES; next < end; next++) out = close_window(&t, a, next, out);

    a->rows[part] = out - before;
    release(t.slots, t.capacity * sizeof(slot));
    release(t.keys, a->n * sizeof(int64_t));
    for (int r = 0; r < RING; r++) release(t.counts[r], a->n * sizeof(uint32_t));
}

void sliding_count(const int64_t *key, const int64_t *time, int64_t n, int64_t base, int64_t *out_key,
                   int64_t *out_start, int64_t *out_count, int64_t room, int64_t *rows, int parts) {
    sliding_args a = {key, time, n, base, out_key, out_start, out_count, room, rows};
    in_parallel(slide_part, &a, parts);
}
