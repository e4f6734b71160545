/* A disk that obeys a test: preloaded into every process of a broker.

   Calls of libc that change files below FAULT_DISK_ROOT pass through here. The words of the control
   file FAULT_DISK_CONTROL, mapped by every process, say what goes wrong just now; the test changes
   them while the broker runs. With FAULT_DISK_JOURNAL set, every change and every sync that
   succeeded is appended to that file: what was durable at any of its positions can be computed
   from it (power.py reads it). FAULT_DISK_BOOT_ID names a file that is read in place of the kernel's
   boot id, since a power cut means another boot.

   The words and the records are drawn twice, here and in disk.py and power.py; keep them equal. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum word {
    SYNC_DELAY_US, /* every sync takes so much longer */
    SYNC_HELD,     /* syncs stand still while this is not 0, but those that fail */
    SYNC_ERRNO,    /* syncs fail with this ... */
    SYNC_FAILURES, /* ... so many times; -1: until told otherwise */
    FULL,          /* 1: nothing can be allocated; 2: nothing can be written at all;
                      3: there is room, but every other write stops after a few bytes */
    WRITE_ERRNO,   /* with which writes fail while FULL */
    TORN,          /* a write that fails leaves its first half behind */
    SYNCS,         /* from here on counted by the processes */
    SYNCS_FAILED,
    SYNCS_WAITING,
    WRITES_FAILED,
    WRITES_SHORT,
    WRITES_DURABLE,
};
enum { CONTROL_BYTES = 4096, FILTER_AT = 2048, JOURNAL_FD_MIN = 700, SHORT_SHARE = 32, BLOCK = 4096 };
enum record { WRITE = 1, SYNC, GROW, TRUNCATE, CREATE, RENAME, UNLINK };
enum { ZEROS = 1, DURABLE = 2, FOLDER = 4 };

struct head {
    uint32_t kind, flags;
    uint64_t inode, at, size;
    uint32_t path_bytes, data_bytes;
};

static int64_t *control;
static char root[PATH_MAX];
static size_t root_bytes;
static const char *boot_id;
static int journal = -1;
static __thread int was_torn, durable;

static int64_t word(enum word w) { return __atomic_load_n(control + w, __ATOMIC_ACQUIRE); }
static void count(enum word w, int64_t by) { __atomic_fetch_add(control + w, by, __ATOMIC_ACQ_REL); }

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("FAULT_DISK_ROOT"), *path = getenv("FAULT_DISK_CONTROL");
    if (!folder || !path) return;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) { perror("FAULT_DISK_CONTROL"); abort(); }
    void *memory = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) { perror("FAULT_DISK_CONTROL"); abort(); }
    close(fd);
    snprintf(root, sizeof root, "%s", folder);
    root_bytes = strlen(root);
    boot_id = getenv("FAULT_DISK_BOOT_ID");
    path = getenv("FAULT_DISK_JOURNAL");
    if (path) {
        fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        journal = fcntl(fd, F_DUPFD_CLOEXEC, JOURNAL_FD_MIN);
        if (fd < 0 || journal < 0) { perror("FAULT_DISK_JOURNAL"); abort(); }
        close(fd);
    }
    control = memory;
}

/* ---- which file ---- */

static int below_root(const char *path) {
    return !strncmp(path, root, root_bytes) && (path[root_bytes] == '/' || !path[root_bytes]);
}

/* 1 and the path, if the descriptor is one of ours */
static int is_ours(int fd, char *path) {
    if (!control || fd < 0) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int saved = errno;
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    errno = saved;
    if (n <= 0) return 0;
    path[n] = 0;
    return below_root(path);
}

static int absolute(int folder, const char *name, char *path) {
    if (!control || !name) return 0;
    if (name[0] == '/') { snprintf(path, PATH_MAX, "%s", name); return below_root(path); }
    char start[PATH_MAX];
    if (folder == AT_FDCWD) {
        if (!getcwd(start, sizeof start)) return 0;
    } else if (!is_ours(folder, start)) return 0;
    if (strlen(start) + strlen(name) + 2 > PATH_MAX) return 0;
    strcat(strcat(strcpy(path, start), "/"), name);
    return below_root(path);
}

/* ---- the journal ---- */

static void note(enum record kind, uint32_t flags, uint64_t inode, uint64_t at, uint64_t size,
                 const char *path, uint32_t path_bytes, const struct iovec *data, int parts,
                 uint32_t data_bytes) {
    if (journal < 0) return;
    int saved = errno;
    struct head head = {kind, flags, inode, at, size, path_bytes, data_bytes};
    struct iovec all[2 + IOV_MAX];
    int n = 0;
    all[n++] = (struct iovec){&head, sizeof head};
    if (path_bytes) all[n++] = (struct iovec){(void *)path, path_bytes};
    size_t left = data_bytes, total = sizeof head + path_bytes + data_bytes;
    for (int i = 0; i < parts && left && n < IOV_MAX; i++) {
        size_t take = data[i].iov_len < left ? data[i].iov_len : left;
        all[n++] = (struct iovec){data[i].iov_base, take};
        left -= take;
    }
    if (left || syscall(SYS_writev, journal, all, n) != (ssize_t)total) {
        fprintf(stderr, "the journal of the disk cannot be written\n");
        abort();
    }
    errno = saved;
}

static void note_file(enum record kind, uint32_t flags, int fd, uint64_t at, uint64_t size) {
    struct stat file;
    if (journal >= 0 && !fstat(fd, &file))
        note(kind, flags, file.st_ino, at, size, NULL, 0, NULL, 0, 0);
}

static void note_write(int fd, const struct iovec *data, int parts, int64_t at, size_t size) {
    struct stat file;
    if (journal < 0 || fstat(fd, &file) || !S_ISREG(file.st_mode)) return;
    uint32_t flags = durable || fcntl(fd, F_GETFL) & O_DSYNC ? DURABLE : 0;
    int zeros = 1;
    size_t left = size;
    for (int i = 0; i < parts && left && zeros; i++) {
        size_t take = data[i].iov_len < left ? data[i].iov_len : left;
        const char *bytes = data[i].iov_base;
        zeros = !take || (!bytes[0] && !memcmp(bytes, bytes + 1, take - 1));
        left -= take;
    }
    if (zeros) flags |= ZEROS;
    note(WRITE, flags, file.st_ino, at, size, NULL, 0, data, parts, zeros ? 0 : size);
}

/* ---- syncs ---- */

static void pause_us(int64_t us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&time, &time) && errno == EINTR) {}
}

static int fails_now(void) {
    int64_t left = word(SYNC_FAILURES);
    while (left > 0)
        if (__atomic_compare_exchange_n(control + SYNC_FAILURES, &left, left - 1, 0,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return 1;
    return left < 0;
}

static int sync_fails(void) {
    int fault = word(SYNC_ERRNO);
    if (!fault || !fails_now()) return 0;
    count(SYNCS_FAILED, 1);
    errno = fault;
    return 1;
}

/* What orders make of a sync of this file: 0, or -1 and errno */
static int obey(const char *path) {
    if (!strstr(path, (const char *)control + FILTER_AT)) return 0;
    count(SYNCS, 1);
    if (sync_fails()) return -1;
    if (word(SYNC_HELD)) {
        count(SYNCS_WAITING, 1);
        while (word(SYNC_HELD)) pause_us(1000);
        count(SYNCS_WAITING, -1);
        if (sync_fails()) return -1;
    }
    if (word(SYNC_DELAY_US)) pause_us(word(SYNC_DELAY_US));
    return 0;
}

static int sync_file(int fd, int (*real)(int)) {
    char path[PATH_MAX];
    if (!is_ours(fd, path)) return real(fd);
    if (obey(path)) return -1;
    struct stat file;
    off_t covered = journal >= 0 ? lseek(journal, 0, SEEK_END) : 0;
    int result = real(fd);
    if (journal >= 0 && !result && !fstat(fd, &file)) {
        int folder = S_ISDIR(file.st_mode);
        note(SYNC, folder ? FOLDER : 0, file.st_ino, covered, 0, path, folder ? strlen(path) : 0,
             NULL, 0, 0);
    }
    return result;
}

int fdatasync(int fd) { REAL(fdatasync); return sync_file(fd, real); }
int fsync(int fd) { REAL(fsync); return sync_file(fd, real); }

/* ---- writes ---- */

/* How much of a write may be done: all of it, its half, or 0 and errno */
static size_t allowed(int fd, int64_t at, size_t size) {
    int64_t full = word(FULL);
    struct stat file;
    if (!full || !size || fstat(fd, &file) || !S_ISREG(file.st_mode)) return size;
    if (full == 1 && at + (int64_t)size <= file.st_size) return size;
    if (full == 3) {
        /* around the page cache a write is short by whole blocks */
        size_t some = fcntl(fd, F_GETFL) & O_DIRECT ? size / 2 & ~(size_t)(BLOCK - 1) : size / SHORT_SHARE;
        was_torn = !was_torn && some;
        count(WRITES_SHORT, was_torn);
        return was_torn ? some : size;
    }
    if (word(TORN) && !was_torn && size > 1) {
        was_torn = 1;
        return size / 2;
    }
    was_torn = 0;
    count(WRITES_FAILED, 1);
    errno = word(WRITE_ERRNO);
    return 0;
}

/* at < 0: where the descriptor stands */
static ssize_t write_parts(int fd, const struct iovec *data, int parts, int64_t at) {
    char path[PATH_MAX];
    REAL(pwritev);
    int ours = is_ours(fd, path);
    if (!ours) return at < 0 ? syscall(SYS_writev, fd, data, parts) : real(fd, data, parts, at);
    size_t size = 0;
    for (int i = 0; i < parts; i++) size += data[i].iov_len;
    int64_t start = at < 0 ? lseek(fd, 0, SEEK_CUR) : at;
    size_t room = allowed(fd, start, size);
    if (size && !room) return -1;
    ssize_t done;
    if (room == size) {
        done = at < 0 ? syscall(SYS_writev, fd, data, parts) : real(fd, data, parts, at);
    } else {
        struct iovec some[IOV_MAX];
        int n = 0;
        for (size_t left = room; left && n < parts; n++) {
            some[n] = data[n];
            if (some[n].iov_len > left) some[n].iov_len = left;
            left -= some[n].iov_len;
        }
        done = at < 0 ? syscall(SYS_writev, fd, some, n) : real(fd, some, n, at);
    }
    if (done > 0) note_write(fd, data, parts, start, done);
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    char path[PATH_MAX];
    if (!is_ours(fd, path)) return real(fd, data, size);
    struct iovec part = {(void *)data, size};
    return write_parts(fd, &part, 1, -1);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    struct iovec part = {(void *)data, size};
    return write_parts(fd, &part, 1, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return pwrite(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec *data, int parts) {
    return write_parts(fd, data, parts, -1);
}
ssize_t pwritev(int fd, const struct iovec *data, int parts, off_t at) {
    return write_parts(fd, data, parts, at);
}
ssize_t pwritev64(int fd, const struct iovec *data, int parts, off64_t at) {
    return write_parts(fd, data, parts, at);
}
/* A durable write is a write, and then a sync of these bytes alone: it can be late or fail in either. */
ssize_t pwritev2(int fd, const struct iovec *data, int parts, off_t at, int flags) {
    REAL(pwritev2);
    char path[PATH_MAX];
    int is_direct = control && fcntl(fd, F_GETFL) & O_DSYNC;
    if (!is_ours(fd, path) || (flags && flags != RWF_DSYNC)) return real(fd, data, parts, at, flags);
    if (!flags && !is_direct) return write_parts(fd, data, parts, at);
    count(WRITES_DURABLE, 1);
    if (is_direct && obey(path)) return -1;
    ssize_t done = write_parts(fd, data, parts, at);
    if (is_direct || done <= 0) return done;
    if (obey(path)) return -1;
    if (real(fd, data, parts, at, flags) < done) return -1;
    durable = 1;
    note_write(fd, data, parts, at, done);
    durable = 0;
    return done;
}
ssize_t pwritev64v2(int fd, const struct iovec *data, int parts, off64_t at, int flags) {
    return pwritev2(fd, data, parts, at, flags);
}

/* ---- sizes ---- */

static int full_now(void) { return word(FULL) == 1 || word(FULL) == 2; }

int posix_fallocate(int fd, off_t at, off_t size) {
    REAL(posix_fallocate);
    char path[PATH_MAX];
    if (!is_ours(fd, path)) return real(fd, at, size);
    struct stat file;
    if (full_now() && !fstat(fd, &file) && at + size > file.st_size) {
        count(WRITES_FAILED, 1);
        return word(WRITE_ERRNO);
    }
    int result = real(fd, at, size);
    if (!result) note_file(GROW, 0, fd, 0, at + size);
    return result;
}
int posix_fallocate64(int fd, off64_t at, off64_t size) { return posix_fallocate(fd, at, size); }

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    char path[PATH_MAX];
    if (!is_ours(fd, path)) return real(fd, size);
    struct stat file;
    if (full_now() && !fstat(fd, &file) && size > file.st_size) {
        count(WRITES_FAILED, 1);
        errno = word(WRITE_ERRNO);
        return -1;
    }
    int result = real(fd, size);
    if (!result) note_file(TRUNCATE, 0, fd, 0, size);
    return result;
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

/* ---- names ---- */

static int open_file(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    struct stat file;
    if (boot_id && !strcmp(name, "/proc/sys/kernel/random/boot_id")) name = boot_id;
    int ours = journal >= 0 && flags & (O_CREAT | O_TRUNC) && absolute(folder, name, path);
    int is_new = ours && fstatat(folder, name, &file, 0);
    int fd = syscall(SYS_openat, folder, name, flags, mode);
    if (ours && fd >= 0 && !fstat(fd, &file)) {
        if (is_new) note(CREATE, 0, file.st_ino, 0, 0, path, strlen(path), NULL, 0, 0);
        else if (flags & O_TRUNC) note_file(TRUNCATE, 0, fd, 0, 0);
    }
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }
int open(const char *name, int flags, ...) {
    MODE(flags)
    return open_file(AT_FDCWD, name, flags, mode);
}
int open64(const char *name, int flags, ...) {
    MODE(flags)
    return open_file(AT_FDCWD, name, flags | O_LARGEFILE, mode);
}
int openat(int folder, const char *name, int flags, ...) {
    MODE(flags)
    return open_file(folder, name, flags, mode);
}
int openat64(int folder, const char *name, int flags, ...) {
    MODE(flags)
    return open_file(folder, name, flags | O_LARGEFILE, mode);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    char paths[2 * PATH_MAX], target[PATH_MAX];
    int ours = absolute(AT_FDCWD, from, paths) && absolute(AT_FDCWD, to, target);
    int result = real(from, to);
    if (ours && !result) {
        size_t n = strlen(paths) + 1;
        strcpy(paths + n, target);
        note(RENAME, 0, 0, 0, 0, paths, n + strlen(target), NULL, 0, 0);
    }
    return result;
}

static int removed(int result, int ours, const char *path) {
    if (ours && !result) note(UNLINK, 0, 0, 0, 0, path, strlen(path), NULL, 0, 0);
    return result;
}
int unlink(const char *name) {
    REAL(unlink);
    char path[PATH_MAX];
    int ours = absolute(AT_FDCWD, name, path);
    return removed(real(name), ours, path);
}
int unlinkat(int folder, const char *name, int flags) {
    REAL(unlinkat);
    char path[PATH_MAX];
    int ours = !(flags & AT_REMOVEDIR) && absolute(folder, name, path);
    return removed(real(folder, name, flags), ours, path);
}
