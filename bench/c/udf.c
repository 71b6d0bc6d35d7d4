// A function of two columns with a branch and a short loop: bound by arithmetic.
#include "common.h"

static inline double score(double price, int64_t qty) {
    double total = 0.0;
    if (qty > 50) {
        for (int64_t k = 0; k < 8; k++) total = total * 0.9 + price / (double)(k + 1);
    } else {
        total = price * (double)qty;
    }
    return total;
}

void udf_score(const double *price, const int64_t *qty, int64_t n, double *out) {
    for (int64_t i = 0; i < n; i++) out[i] = score(price[i], qty[i]);
}
