/* Work in shares that the threads of PyTorch's team take one after the other. */
#ifndef PHALANX_TEAM_H
#define PHALANX_TEAM_H
#include <stdint.h>

/* GOMP_parallel, of whichever OpenMP runtime the process has. */
typedef void (*parallel_function)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* Where the next share of so many pieces begins; it may lie behind the end. */
static inline int64_t taken(int64_t *next, int64_t pieces) {
    return __atomic_fetch_add(next, pieces, __ATOMIC_RELAXED);
}

static inline int64_t end_of(int64_t begin, int64_t pieces, int64_t count) {
    return count - begin < pieces ? count : begin + pieces;
}

/* `work` in this thread, or in as many as `threads` where there is a team. */
static inline void in_team(void (*work)(void *), void *data, parallel_function parallel, int64_t threads) {
    if (parallel && threads > 1)
        parallel(work, data, (unsigned)threads, 0);
    else
        work(data);
}

#endif
