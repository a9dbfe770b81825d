/* An all-gather of a few bytes among processes of one host, through memory that they share.

   Compiled on the machine by moe_tp/parallel/exchange.py. Each rank has a slot: a line with the
   number of its last exchange and whether it has failed since, then two rooms that take turns. A
   rank that writes a room has seen every other enter the exchange before, so all have read what the
   room held. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define LINE 64 /* bytes */
#define SPINS 4000 /* looks before the processor is left to others */

static char *slot(char *memory, int64_t rank, int64_t room) {
    return memory + rank * (LINE + 2 * room);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Put `bytes` of x into this rank's room and say so. */
void moe_tp_exchange_put(char *memory, int64_t rank, int64_t room, uint64_t turn, const void *x,
                         int64_t bytes) {
    char *own = slot(memory, rank, room);
    memcpy(own + LINE + turn % 2 * room, x, bytes);
    __atomic_store_n((uint64_t *)own, turn, __ATOMIC_RELEASE);
}

/* Say that this rank takes part no more. */
void moe_tp_exchange_fail(char *memory, int64_t rank, int64_t room) {
    __atomic_store_n((uint64_t *)slot(memory, rank, room) + 1, 1, __ATOMIC_RELEASE);
}

/* Whether that rank has said so. */
int moe_tp_exchange_failed(char *memory, int64_t rank, int64_t room) {
    return __atomic_load_n((uint64_t *)slot(memory, rank, room) + 1, __ATOMIC_ACQUIRE) != 0;
}

/* Fill y with what each rank has put, in rank order. Returns -1, or after `patience` seconds the
   first rank that has put nothing. */
int64_t moe_tp_exchange_take(char *memory, int64_t ranks, int64_t room, uint64_t turn, void *y,
                             int64_t bytes, double patience) {
    double until = 0;
    for (int64_t rank = 0; rank < ranks; rank++) {
        char *other = slot(memory, rank, room);
        for (int64_t spins = 0; __atomic_load_n((uint64_t *)other, __ATOMIC_ACQUIRE) < turn;
             spins++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            if (spins < SPINS) continue;
            sched_yield();
            if (until == 0) until = now() + patience;
            if (spins % 64 == 0 && now() > until) return rank;
        }
        memcpy((char *)y + rank * bytes, other + LINE + turn % 2 * room, bytes);
    }
    return -1;
}
