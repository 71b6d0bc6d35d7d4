// What the yardsticks share: huge-page memory, a hash, and a parallel loop. Each yardstick is one query, written by
// hand for it: it knows types, window sizes and that there are no nulls, which a compiler of queries must find out.
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { BLOCK = 1024, MAX_THREADS = 64, HUGE_PAGE = 2 << 20 };

static inline size_t whole_pages(size_t bytes) {
    return (bytes + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1);
}

// Zeroed memory; pages that are never touched cost nothing.
static inline void *reserve(size_t bytes) {
    void *memory = mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    madvise(memory, whole_pages(bytes), MADV_HUGEPAGE);
    return memory;
}

static inline void release(void *memory, size_t bytes) { munmap(memory, whole_pages(bytes)); }

// The high bits are good: use them for partitions, the bits below for slots.
static inline uint64_t mix(int64_t key) {
    uint64_t h = (uint64_t)key * 0x9E3779B97F4A7C15ull;
    return h ^ (h >> 29);
}

typedef void (*part_fn)(void *args, int part, int parts);
typedef struct { part_fn fn; void *args; int part, parts; } part_call;

static void *enter_part(void *raw) {
    part_call *call = raw;
    call->fn(call->args, call->part, call->parts);
    return NULL;
}

// fn(args, part, parts) for every part, each on a thread of its own; the caller's thread takes the first.
static inline void in_parallel(part_fn fn, void *args, int parts) {
    pthread_t threads[MAX_THREADS];
    part_call calls[MAX_THREADS];
    for (int part = 1; part < parts; part++) {
        calls[part] = (part_call){fn, args, part, parts};
        if (pthread_create(&threads[part], NULL, enter_part, &calls[part])) abort();
    }
    fn(args, 0, parts);
    for (int part = 1; part < parts; part++) pthread_join(threads[part], NULL);
}
