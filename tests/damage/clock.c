/* A wall clock that a test sets while others run: CLOCK_REALTIME moved by the seconds in a file.
 *
 * Preloaded into a broker. DANUBE_CLOCK_FILE names a file with one int64, the shift in ns, which is
 * mapped once and read at each call. The monotonic clock is left alone, as by `date -s`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift_ns;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void prepare(void) {
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("DANUBE_CLOCK_FILE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *page = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED) shift_ns = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = real_gettime(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME && shift_ns) {
        int64_t total = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + *shift_ns;
        now->tv_sec = total / 1000000000;
        now->tv_nsec = total % 1000000000;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
