// Aggregation by key. Few keys: arrays by key. Many: rows are partitioned by hash first, through buffers of one cache
// line each that leave by non-temporal stores, and then every partition is aggregated in a table that fits L2.
#include "common.h"

enum { LANES = 4, PARTITION_BITS = 9, PARTITIONS = 1 << PARTITION_BITS, LINE = 4 };

// counts[keys], sums[keys]: zeroed by the caller. Keys are 0 .. keys - 1.
void group_few(const int32_t *key, const double *value, int64_t n, int64_t keys, int64_t *counts, double *sums) {
    typedef struct { int64_t count; double sum; } cell;
    size_t bytes = (size_t)keys * LANES * sizeof(cell);
    cell *cells = reserve(bytes);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)  // neighbouring rows use different cells, so that no update waits for a store
        for (int lane = 0; lane < LANES; lane++) {
            cell *c = &cells[lane * keys + key[i + lane]];
            c->count++;
            c->sum += value[i + lane];
        }
    for (; i < n; i++) cells[key[i]].count++, cells[key[i]].sum += value[i];
    for (int lane = 0; lane < LANES; lane++)
        for (int64_t k = 0; k < keys; k++) {
            counts[k] += cells[lane * keys + k].count;
            sums[k] += cells[lane * keys + k].sum;
        }
    release(cells, bytes);
}

typedef struct { int64_t key; double value; } row;
typedef struct { int64_t key, count; double sum, least, most; } group;  // count 0: empty

typedef struct {
    const int64_t *key; const double *value; int64_t n;
    int64_t *out_key, *out_count; double *out_sum, *out_least, *out_most;
    int64_t *starts, *rows;  // where a part's output starts, and how many rows it is
    row *scattered; size_t scattered_bytes;
    int64_t histogram[MAX_THREADS][PARTITIONS];
    int64_t begin[MAX_THREADS][PARTITIONS];  // in `scattered`, a multiple of LINE
    int64_t total[PARTITIONS];
    pthread_barrier_t barrier;
} group_args;

static inline int partition_of(int64_t key) { return (int)(mix(key) >> (64 - PARTITION_BITS)); }

static inline void write_line(row *to, const row *line) {
#ifdef __AVX512F__
    _mm512_stream_si512((__m512i *)to, _mm512_load_si512(line));
#else
    memcpy(to, line, LINE * sizeof(row));
#endif
}

static void scatter(group_args *a, int part, int64_t from, int64_t to) {
    static _Thread_local row lines[PARTITIONS][LINE] __attribute__((aligned(64)));
    int64_t at[PARTITIONS];
    memcpy(at, a->begin[part], sizeof at);
    for (int64_t i = from; i < to; i++) {
        int p = partition_of(a->key[i]);
        int64_t place = at[p]++;
        lines[p][place % LINE] = (row){a->key[i], a->value[i]};
        if (place % LINE == LINE - 1) write_line(a->scattered + place - (LINE - 1), lines[p]);
    }
    for (int p = 0; p < PARTITIONS; p++) {
        int64_t rest = at[p] % LINE;
        memcpy(a->scattered + at[p] - rest, lines[p], rest * sizeof(row));
    }
#ifdef __AVX512F__
    _mm_sfence();
#endif
}

static group *grow(group *old, uint64_t *capacity) {
    uint64_t mask = 2 * *capacity - 1;
    group *groups = reserve((mask + 1) * sizeof(group));
    for (uint64_t s = 0; s < *capacity; s++)
        if (old[s].count) {
            uint64_t to = mix(old[s].key) & mask;
            while (groups[to].count) to = (to + 1) & mask;
            groups[to] = old[s];
        }
    release(old, *capacity * sizeof(group));
    *capacity = mask + 1;
    return groups;
}

static inline int64_t add_row(group *groups, uint64_t mask, row r) {
    for (uint64_t s = mix(r.key) & mask;; s = (s + 1) & mask) {
        group *g = &groups[s];
        if (!g->count) {
            *g = (group){r.key, 1, r.value, r.value, r.value};
            return 1;
        }
        if (g->key == r.key) {
            g->count++;
            g->sum += r.value;
            g->least = r.value < g->least ? r.value : g->least;
            g->most = r.value > g->most ? r.value : g->most;
            return 0;
        }
    }
}

static void group_part(void *raw, int part, int parts) {
    group_args *a = raw;
    int64_t from = a->n * part / parts, to = a->n * (part + 1) / parts;
    for (int64_t i = from; i < to; i++) a->histogram[part][partition_of(a->key[i])]++;
    pthread_barrier_wait(&a->barrier);
    if (part == 0) {
        int64_t place = 0;
        for (int p = 0; p < PARTITIONS; p++)
            for (int q = 0; q < parts; q++) {
                a->begin[q][p] = place;
                place += (a->histogram[q][p] + LINE - 1) / LINE * LINE;
                a->total[p] += a->histogram[q][p];
            }
    }
    pthread_barrier_wait(&a->barrier);
    scatter(a, part, from, to);
    pthread_barrier_wait(&a->barrier);

    int first = PARTITIONS * part / parts, behind = PARTITIONS * (part + 1) / parts;
    int64_t out = 0;  // a partition has no more groups than rows: parts cannot meet
    for (int p = 0; p < first; p++) out += a->total[p];
    a->starts[part] = out;
    uint64_t capacity = 1 << 12;
    group *groups = reserve(capacity * sizeof(group));
    for (int p = first; p < behind; p++) {
        int64_t count = 0;
        for (int q = 0; q < parts; q++) {
            const row *r = a->scattered + a->begin[q][p];
            for (int64_t left = a->histogram[q][p]; left > 0;) {
                int64_t m = left < BLOCK ? left : BLOCK;
                while ((count + m) * 4 > (int64_t)capacity * 3) groups = grow(groups, &capacity);
                for (int64_t k = 0; k < m; k++) count += add_row(groups, capacity - 1, r[k]);
                left -= m, r += m;
            }
        }
        for (uint64_t s = 0; s < capacity; s++)
            if (groups[s].count) {
                a->out_key[out] = groups[s].key;
                a->out_count[out] = groups[s].count;
                a->out_sum[out] = groups[s].sum;
                a->out_least[out] = groups[s].least;
                a->out_most[out++] = groups[s].most;
                groups[s].count = 0;
            }
    }
    a->rows[part] = out - a->starts[part];
    release(groups, capacity * sizeof(group));
}

// Output arrays have room for n rows; part q's groups are out[starts[q] .. starts[q] + rows[q]].
void group_many(const int64_t *key, const double *value, int64_t n, int64_t *out_key, int64_t *out_count,
                double *out_sum, double *out_least, double *out_most, int64_t *starts, int64_t *rows, int parts) {
    group_args *a = calloc(1, sizeof *a);
    if (!a) abort();
    a->key = key, a->value = value, a->n = n;
    a->out_key = out_key, a->out_count = out_count;
    a->out_sum = out_sum, a->out_least = out_least, a->out_most = out_most;
    a->starts = starts, a->rows = rows;
    a->scattered_bytes = ((size_t)n + (size_t)LINE * PARTITIONS * parts) * sizeof(row);
    a->scattered = reserve(a->scattered_bytes);
    pthread_barrier_init(&a->barrier, NULL, parts);
    in_parallel(group_part, a, parts);
    pthread_barrier_destroy(&a->barrier);
    release(a->scattered, a->scattered_bytes);
    free(a);
}
