/* Loaded before the C library into the processes of a run (LD_PRELOAD): file functions that fail or are slow below a
 * directory, and a wall clock that is wrong. What it does is said in a file that all processes have mapped; see shim.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, RENAME = 16 };

struct control {
    int64_t clock_shift_ns; /* added to the wall clock */
    int64_t delay_ns;       /* before each function of a file */
    int32_t error;          /* errno, 0: none */
    int32_t percent;        /* of the calls that fail */
    int32_t functions;      /* which, see above */
    char below[PATH_MAX];   /* of which directory */
};

static volatile struct control *control;
static struct control nothing;
static unsigned char is_below[65536]; /* by file descriptor */

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SWIFT_FAULTS_CONTROL");
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(0, sizeof nothing, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    control = mapped == MAP_FAILED ? &nothing : mapped;
    if (file >= 0) syscall(SYS_close, file);
}

static volatile struct control *now(void) { return control ? control : &nothing; }

#define NEXT(type, name, ...)                                   \
    static type (*next)(__VA_ARGS__);                           \
    if (!next) next = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* ---- files ---- */

static int concerns(int directory, const char *path) {
    char real[2 * PATH_MAX];
    size_t length = strlen((const char *)now()->below);
    if (!length || !path) return 0;
    if (path[0] != '/') {
        char link[64];
        long size;
        if (directory == AT_FDCWD) size = syscall(SYS_getcwd, real, PATH_MAX) - 1;
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            size = syscall(SYS_readlinkat, AT_FDCWD, link, real, PATH_MAX);
        }
        if (size < 0) return 0;
        snprintf(real + size, sizeof real - size, "/%s", path);
        path = real;
    }
    return !strncmp(path, (const char *)now()->below, length);
}

/* Waits as told; returns whether the call is to fail. */
static int trouble(int function) {
    int64_t delay = now()->delay_ns;
    static __thread unsigned seed;
    if (!(now()->functions & function)) return 0;
    if (delay > 0) {
        struct timespec pause = {delay / 1000000000, delay % 1000000000};
        int kept = errno;
        syscall(SYS_nanosleep, &pause, 0);
        errno = kept;
    }
    if (!now()->error) return 0;
    if (!seed) seed = (unsigned)(getpid() ^ (uintptr_t)&seed ^ (uintptr_t)now());
    if ((int)(rand_r(&seed) % 100) >= now()->percent) return 0;
    errno = now()->error;
    return 1;
}

static int of_file(int file, int function) {
    return file >= 0 && file < (int)sizeof is_below && is_below[file] && trouble(function);
}

static int opened(int file, int is) {
    if (file >= 0 && file < (int)sizeof is_below) is_below[file] = (unsigned char)is;
    return file;
}

#define MODE(flags, mode)                                       \
    mode_t mode = 0;                                            \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                    \
        va_list more;                                           \
        va_start(more, flags);                                  \
        mode = va_arg(more, mode_t);                            \
        va_end(more);                                           \
    }

#define OPENS(name)                                             \
    int name(const char *path, int flags, ...) {                \
        MODE(flags, mode)                                       \
        NEXT(int, #name, const char *, int, ...);               \
        int is = concerns(AT_FDCWD, path);                      \
        if (is && trouble(OPEN)) return -1;                     \
        return opened(next(path, flags, mode), is);             \
    }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                          \
    int name(int directory, const char *path, int flags, ...) { \
        MODE(flags, mode)                                       \
        NEXT(int, #name, int, const char *, int, ...);          \
        int is = concerns(directory, path);                     \
        if (is && trouble(OPEN)) return -1;                     \
        return opened(next(directory, path, flags, mode), is);  \
    }
OPENS_AT(openat)
OPENS_AT(openat64)

int close(int file) {
    NEXT(int, "close", int);
    opened(file, 0);
    return next(file);
}

#define OF_FILE(type, name, function, parameters, types, arguments) \
    type name parameters {                                      \
        static type (*next) types;                              \
        if (!next) next = (type(*) types)dlsym(RTLD_NEXT, #name); \
        if (of_file(file, function)) return -1;                 \
        return next arguments;                                  \
    }
OF_FILE(ssize_t, read, READ, (int file, void *to, size_t n), (int, void *, size_t), (file, to, n))
OF_FILE(ssize_t, pread, READ, (int file, void *to, size_t n, off_t at), (int, void *, size_t, off_t), (file, to, n, at))
OF_FILE(ssize_t, pread64, READ, (int file, void *to, size_t n, off64_t at), (int, void *, size_t, off64_t), (file, to, n, at))
OF_FILE(ssize_t, write, WRITE, (int file, const void *from, size_t n), (int, const void *, size_t), (file, from, n))
OF_FILE(ssize_t, writev, WRITE, (int file, const struct iovec *from, int n), (int, const struct iovec *, int), (file, from, n))
OF_FILE(ssize_t, pwrite, WRITE, (int file, const void *from, size_t n, off_t at), (int, const void *, size_t, off_t), (file, from, n, at))
OF_FILE(ssize_t, pwrite64, WRITE, (int file, const void *from, size_t n, off64_t at), (int, const void *, size_t, off64_t), (file, from, n, at))
OF_FILE(int, fsync, SYNC, (int file), (int), (file))
OF_FILE(int, fdatasync, SYNC, (int file), (int), (file))

int rename(const char *from, const char *to) {
    NEXT(int, "rename", const char *, const char *);
    return concerns(AT_FDCWD, to) && trouble(RENAME) ? -1 : next(from, to);
}

int renameat(int in, const char *from, int into, const char *to) {
    NEXT(int, "renameat", int, const char *, int, const char *);
    return concerns(into, to) && trouble(RENAME) ? -1 : next(in, from, into, to);
}

int mkdir(const char *path, mode_t mode) {
    NEXT(int, "mkdir", const char *, mode_t);
    return concerns(AT_FDCWD, path) && trouble(RENAME) ? -1 : next(path, mode);
}

/* ---- the wall clock ---- */

static struct timespec moved(const struct timespec *time, int64_t by_ns) {
    int64_t ns = time->tv_nsec + by_ns % 1000000000;
    struct timespec result = {time->tv_sec + by_ns / 1000000000, ns};
    if (ns >= 1000000000) result.tv_sec++, result.tv_nsec = ns - 1000000000;
    if (ns < 0) result.tv_sec--, result.tv_nsec = ns + 1000000000;
    return result;
}

/* A moment that somebody has computed by the wrong clock, for the kernel, whose clock is right. Moments of the
 * monotonic clock are decades earlier. */
static const struct timespec *for_kernel(const struct timespec *until, struct timespec *moment) {
    if (!until || !now()->clock_shift_ns || until->tv_sec < 1000000000) return until;
    *moment = moved(until, -now()->clock_shift_ns);
    return moment;
}

static int true_time(clockid_t clock, struct timespec *time) {
    NEXT(int, "clock_gettime", clockid_t, struct timespec *);
    return next(clock, time);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int failed = true_time(clock, time);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *time = moved(time, now()->clock_shift_ns);
    return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec fine;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &fine);
    time->tv_sec = fine.tv_sec;
    time->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (to) *to = fine.tv_sec;
    return fine.tv_sec;
}

#define WAITS(name, version, parameters, types, arguments)      \
    int name parameters {                                       \
        static int (*next) types;                               \
        struct timespec moment;                                 \
        if (!next) next = (int(*) types)(version[0] ? dlvsym(RTLD_NEXT, #name, version) : 0); \
        if (!next) next = (int(*) types)dlsym(RTLD_NEXT, #name); \
        return next arguments;                                  \
    }
WAITS(pthread_cond_timedwait, "GLIBC_2.3.2", (pthread_cond_t * c, pthread_mutex_t *m, const struct timespec *until),
      (pthread_cond_t *, pthread_mutex_t *, const struct timespec *), (c, m, for_kernel(until, &moment)))
WAITS(pthread_cond_clockwait, "", (pthread_cond_t * c, pthread_mutex_t *m, clockid_t clock, const struct timespec *until),
      (pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *), (c, m, clock, for_kernel(until, &moment)))
WAITS(sem_timedwait, "", (sem_t * s, const struct timespec *until), (sem_t *, const struct timespec *), (s, for_kernel(until, &moment)))
WAITS(sem_clockwait, "", (sem_t * s, clockid_t clock, const struct timespec *until),
      (sem_t *, clockid_t, const struct timespec *), (s, clock, for_kernel(until, &moment)))

/* Abseil's waits are futexes of its own. */
long syscall(long number, ...) {
    NEXT(long, "syscall", long, ...);
    long a[6];
    struct timespec moment;
    va_list more;
    va_start(more, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(more, long);
    va_end(more);
    if (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET && control)
        a[3] = (long)for_kernel((const struct timespec *)a[3], &moment);
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
