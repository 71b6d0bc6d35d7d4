// Filters: bound by memory bandwidth, if the selected rows are written without a branch a row.
#include "common.h"

enum { DIVISOR = 123 };
static const double RATE = 0.908;

// x is a multiple of an odd d iff x * d^-1 (mod 2^64) lies within +-(2^63 - 1) / d: no division.
static inline uint64_t inverse(uint64_t d) {
    uint64_t inv = d;  // right in the low 3 bits; each step doubles them
    for (int i = 0; i < 5; i++) inv *= 2 - d * inv;
    return inv;
}

// Rows whose auction is a multiple of DIVISOR, with price * RATE; gives the number of rows written.
int64_t filter_project(const int64_t *auction, const int64_t *price, int64_t n, int64_t *out_auction, double *out_price) {
    const uint64_t inv = inverse(DIVISOR), reach = (uint64_t)INT64_MAX / DIVISOR;
    int64_t out = 0, i = 0;
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const __m512i v_inv = _mm512_set1_epi64((long long)inv), v_reach = _mm512_set1_epi64((long long)reach);
    const __m512i v_span = _mm512_slli_epi64(v_reach, 1);
    const __m512d v_rate = _mm512_set1_pd(RATE);
    for (; i + 8 <= n; i += 8) {
        __m512i a = _mm512_loadu_si512(auction + i);
        __m512i shifted = _mm512_add_epi64(_mm512_mullo_epi64(a, v_inv), v_reach);
        __mmask8 hit = _mm512_cmple_epu64_mask(shifted, v_span);
        if (!hit) continue;
        __m512d p = _mm512_mul_pd(_mm512_cvtepi64_pd(_mm512_loadu_si512(price + i)), v_rate);
        _mm512_mask_compressstoreu_epi64(out_auction + out, hit, a);
        _mm512_mask_compressstoreu_pd(out_price + out, hit, p);
        out += __builtin_popcount(hit);
    }
#endif
    for (; i < n; i++)
        if ((uint64_t)auction[i] * inv + reach <= 2 * reach) {
            out_auction[out] = auction[i];
            out_price[out++] = (double)price[i] * RATE;
        }
    return out;
}

// The sum of price where qty > least: one branch-free loop that gcc vectorizes.
int64_t filter_sum(const int64_t *qty, const int64_t *price, int64_t n, int64_t least) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += qty[i] > least ? price[i] : 0;
    return sum;
}
