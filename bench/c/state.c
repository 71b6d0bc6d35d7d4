// State: sum, count and max by key in a table that has room for all keys. Entries and prefetching are those of the
// yardstick's presized table (W3): 40 bytes, 24 rows ahead. A table lives on from call to call, as a store does.
// With several threads each has a table of its own, looks at all rows, and takes those whose hash says so.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"

enum { AHEAD = 24, ROWS_AT_ONCE = 2048, PIECE = 4096 };

typedef struct { int64_t key, count; double sum, most; int64_t spare; } entry;  // count 0: empty
typedef struct { entry *entries; uint64_t capacity, count; } table;
typedef struct { int parts; table tables[MAX_THREADS]; } state;
typedef struct { state *s; const int64_t *key; const double *value; int64_t n; } merge_args;

void *state_new(int64_t keys, int parts) {
    state *s = calloc(1, sizeof *s);
    if (!s) abort();
    s->parts = parts;
    for (int part = 0; part < parts; part++) {
        table *t = &s->tables[part];
        for (t->capacity = 1 << 16; t->capacity * 3 / 4 < (uint64_t)(keys / parts);) t->capacity *= 2;
        t->entries = reserve(t->capacity * sizeof(entry));
    }
    return s;
}

void state_free(void *raw) {
    state *s = raw;
    for (int part = 0; part < s->parts; part++) release(s->tables[part].entries, s->tables[part].capacity * sizeof(entry));
    free(s);
}

static inline void merge_row(table *t, uint64_t mask, int64_t key, double value) {
    for (uint64_t at = mix(key) & mask;; at = (at + 1) & mask) {
        entry *e = &t->entries[at];
        if (!e->count) {
            *e = (entry){key, 1, value, value, 0};
            t->count++;
            return;
        }
        if (e->key == key) {
            e->count++;
            e->sum += value;
            e->most = value > e->most ? value : e->most;
            return;
        }
    }
}

static void merge_part(void *raw, int part, int parts) {
    merge_args *a = raw;
    table *t = &a->s->tables[part];
    uint64_t mask = t->capacity - 1;
    int64_t own_key[ROWS_AT_ONCE];
    double own_value[ROWS_AT_ONCE];
    for (int64_t from = 0; from < a->n; from += ROWS_AT_ONCE) {
        int64_t m = a->n - from < ROWS_AT_ONCE ? a->n - from : ROWS_AT_ONCE;
        const int64_t *key = a->key + from;
        const double *value = a->value + from;
        if (parts > 1) {
            int64_t own = 0;
            for (int64_t i = 0; i < m; i++) {
                own_key[own] = key[i], own_value[own] = value[i];
                own += (int)((mix(key[i]) >> 40) % (uint32_t)parts) == part;
            }
            key = own_key, value = own_value, m = own;
        }
        if (t->count + (uint64_t)m > t->capacity) abort();  // it was made for fewer keys
        for (int64_t i = 0; i < m; i++) {
            if (i + AHEAD < m) {
                const char *next = (const char *)&t->entries[mix(key[i + AHEAD]) & mask];
                __builtin_prefetch(next, 1);
                __builtin_prefetch(next + sizeof(entry) - 1, 1);  // it may lie on two cache lines
            }
            merge_row(t, mask, key[i], value[i]);
        }
    }
}

void state_merge(void *s, const int64_t *key, const double *value, int64_t n) {
    merge_args a = {s, key, value, n};
    in_parallel(merge_part, &a, a.s->parts);
}

// All entries, in no order; arrays have room for all keys. Gives their number.
int64_t state_rows(void *raw, int64_t *keys, int64_t *counts, double *sums, double *most) {
    state *s = raw;
    int64_t out = 0;
    for (int part = 0; part < s->parts; part++)
        for (uint64_t at = 0; at < s->tables[part].capacity; at++) {
            entry *e = &s->tables[part].entries[at];
            if (e->count) keys[out] = e->key, counts[out] = e->count, sums[out] = e->sum, most[out++] = e->most;
        }
    return out;
}

// Bytes of a file that are in the page cache, mapped or not; 0 if it is gone.
int64_t cached_bytes(const char *path) {
    int file = open(path, O_RDONLY);
    struct stat about;
    if (file < 0) return 0;
    int64_t cached = 0;
    if (!fstat(file, &about) && about.st_size > 0) {
        size_t pages = ((size_t)about.st_size + 4095) / 4096;
        void *mapped = mmap(NULL, pages * 4096, PROT_READ, MAP_SHARED, file, 0);
        unsigned char *is_in = malloc(PIECE);
        // Piece by piece: one call over gigabytes does not let go of its core for tens of milliseconds, and whatever
        // the kernel has to do there for others, reads among it, waits.
        for (size_t first = 0; mapped != MAP_FAILED && is_in && first < pages; first += PIECE) {
            size_t count = pages - first < PIECE ? pages - first : PIECE;
            if (mincore((char *)mapped + first * 4096, count * 4096, is_in)) break;
            for (size_t page = 0; page < count; page++) cached += (is_in[page] & 1) * 4096;
        }
        free(is_in);
        if (mapped != MAP_FAILED) munmap(mapped, pages * 4096);
    }
    close(file);
    return cached;
}
