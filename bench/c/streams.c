// Joins of two streams in windows, and sessions. Rows of sessions come almost in order: none is a gap behind.
#include "common.h"

enum { WINDOW_MS = 10000, JOIN_AHEAD = 16 };

typedef struct { int64_t id, count; } entry;  // count 0: empty

// The ids of each window, one window after the other; starts[w] is where window w begins.
static int64_t *by_window(const int64_t *id, const int64_t *time, int64_t n, int64_t base, int64_t windows,
                          int64_t *starts) {
    int64_t *out = reserve(n * sizeof(int64_t)), *next = calloc(windows + 1, sizeof(int64_t));
    for (int64_t i = 0; i < n; i++) next[(uint64_t)(time[i] - base) / WINDOW_MS + 1]++;
    for (int64_t w = 0; w < windows; w++) next[w + 1] += next[w];
    memcpy(starts, next, (windows + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < n; i++) out[next[(uint64_t)(time[i] - base) / WINDOW_MS]++] = id[i];
    free(next);
    return out;
}

// How many pairs of rows have one id and one window. A table of one window's left ids, probed by its right ones.
int64_t window_join(const int64_t *left, const int64_t *left_time, int64_t lefts, const int64_t *right,
                    const int64_t *right_time, int64_t rights, int64_t base, int64_t windows) {
    int64_t *left_start = malloc((windows + 1) * 8), *right_start = malloc((windows + 1) * 8), most = 0, pairs = 0;
    int64_t *l = by_window(left, left_time, lefts, base, windows, left_start);
    int64_t *r = by_window(right, right_time, rights, base, windows, right_start);
    for (int64_t w = 0; w < windows; w++) {
        int64_t here = left_start[w + 1] - left_start[w];
        most = here > most ? here : most;
    }
    uint64_t capacity = 1024;
    while (capacity < 2 * (uint64_t)most) capacity *= 2;
    entry *table = reserve(capacity * sizeof(entry));
    uint64_t mask = capacity - 1;
    for (int64_t w = 0; w < windows; w++) {
        memset(table, 0, capacity * sizeof(entry));
        int64_t end = left_start[w + 1];
        for (int64_t i = left_start[w]; i < end; i++) {
            if (i + JOIN_AHEAD < end) __builtin_prefetch(&table[mix(l[i + JOIN_AHEAD]) & mask], 1);
            uint64_t s = mix(l[i]) & mask;
            while (table[s].count && table[s].id != l[i]) s = (s + 1) & mask;
            table[s].id = l[i];
            table[s].count++;
        }
        end = right_start[w + 1];
        for (int64_t i = right_start[w]; i < end; i++) {
            if (i + JOIN_AHEAD < end) __builtin_prefetch(&table[mix(r[i + JOIN_AHEAD]) & mask]);
            uint64_t s = mix(r[i]) & mask;
            while (table[s].count && table[s].id != r[i]) s = (s + 1) & mask;
            pairs += table[s].count;
        }
    }
    release(table, capacity * sizeof(entry));
    release(l, lefts * sizeof(int64_t));
    release(r, rights * sizeof(int64_t));
    free(left_start);
    free(right_start);
    return pairs;
}

typedef struct { int64_t first, last, count; } span;  // count 0: there is none
typedef struct { span now, before; } user_sessions;   // `before` ends earlier, and may still be joined to `now`

static inline void add(span *s, int64_t time) {
    s->first = time < s->first ? time : s->first;
    s->last = time > s->last ? time : s->last;
    s->count++;
}

static int64_t emit(int64_t user, const span *s, int64_t gap, int64_t *out[4], int64_t row) {
    if (!s->count) return row;
    out[0][row] = user, out[1][row] = s->first, out[2][row] = s->last + gap, out[3][row] = s->count;
    return row + 1;
}

// Sessions of users 0 to users - 1, in two records a user: rows are less than a gap behind, so only the last two
// sessions of a user can change. Gives the number of sessions.
int64_t sessions(const int64_t *user, const int64_t *time, int64_t n, int64_t users, int64_t gap, int64_t *out_user,
                 int64_t *out_first, int64_t *out_end, int64_t *out_count) {
    user_sessions *all = reserve(users * sizeof(user_sessions));
    int64_t *out[4] = {out_user, out_first, out_end, out_count}, rows = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + JOIN_AHEAD < n) __builtin_prefetch(&all[user[i + JOIN_AHEAD]], 1);
        user_sessions *u = &all[user[i]];
        int64_t at = time[i];
        if (!u->now.count || at - u->now.last > gap) {
            rows = emit(user[i], &u->before, gap, out, rows);
            u->before = u->now;
            u->now = (span){at, at, 1};
            continue;
        }
        int is_of_before = u->now.first - at > gap;
        if (is_of_before && !u->before.count) u->before = (span){at, at, 0};
        add(is_of_before ? &u->before : &u->now, at);
        if (u->before.count && u->now.first - u->before.last <= gap) {
            u->now.first = u->before.first;
            u->now.count += u->before.count;
            u->before.count = 0;
        }
    }
    for (int64_t k = 0; k < users; k++) {
        rows = emit(k, &all[k].before, gap, out, rows);
        rows = emit(k, &all[k].now, gap, out, rows);
    }
    release(all, users * sizeof(user_sessions));
    return rows;
}
