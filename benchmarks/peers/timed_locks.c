/* libfaketime moves the time of day, but not the deadlines that glibc compares with the real one. Boost's mutexes
 * between Triton server and a model's process wait until a time of day: set back by a day, each wait would be over before
 * it begins, and Boost throws. With a clock that was truly set, deadline and clock are of one kind, as here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static struct timespec in_real_time(const struct timespec *deadline) {
    struct timespec faked, real;
    clock_gettime(CLOCK_REALTIME, &faked);
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &real);
    struct timespec moved = {deadline->tv_sec + real.tv_sec - faked.tv_sec,
                             deadline->tv_nsec + real.tv_nsec - faked.tv_nsec};
    if (moved.tv_nsec < 0) {
        moved.tv_nsec += 1000000000;
        moved.tv_sec -= 1;
    } else if (moved.tv_nsec >= 1000000000) {
        moved.tv_nsec -= 1000000000;
        moved.tv_sec += 1;
    }
    return moved;
}

#define TIMED(NAME, KIND)                                                            \
    int NAME(KIND *lock, const struct timespec *deadline) {                          \
        static int (*next)(KIND *, const struct timespec *);                         \
        if (!next) next = (int (*)(KIND *, const struct timespec *))dlsym(RTLD_NEXT, #NAME); \
        struct timespec moved = in_real_time(deadline);                              \
        return next(lock, &moved);                                                   \
    }

TIMED(pthread_mutex_timedlock, pthread_mutex_t)
TIMED(pthread_rwlock_timedrdlock, pthread_rwlock_t)
TIMED(pthread_rwlock_timedwrlock, pthread_rwlock_t)
TIMED(sem_timedwait, sem_t)
