/* Makes writes to files below a folder fail with EIO, or wait, from the n-th on: the trials of disks.py preload it.
 *
 * FAIL_BELOW: the folder; FAIL_FROM, FAIL_TO: the first and last write concerned; FAIL_MICROSECONDS: wait so long and
 * succeed; 0 to fail.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long writes;

static int concerned(int file) {
    const char *below = getenv("FAIL_BELOW");
    char link[64], path[PATH_MAX];
    if (!below || file < 3) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    if (strncmp(path, below, strlen(below))) return 0;
    long n = ++writes;
    if (n < atol(getenv("FAIL_FROM")) || n > atol(getenv("FAIL_TO"))) return 0;
    long wait = atol(getenv("FAIL_MICROSECONDS"));
    if (wait) usleep(wait);
    return !wait;
}

#define FAILING(result, name, arguments, ...)                             \
    result name arguments {                                               \
        static result(*real) arguments;                                   \
        if (!real) real = (result(*) arguments)dlsym(RTLD_NEXT, #name);   \
        if (concerned(file)) {                                            \
            errno = EIO;                                                  \
            return -1;                                                    \
        }                                                                 \
        return real(__VA_ARGS__);                                         \
    }

FAILING(ssize_t, write, (int file, const void *data, size_t size), file, data, size)
FAILING(ssize_t, writev, (int file, const struct iovec *parts, int count), file, parts, count)
FAILING(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at), file, data, size, at)
FAILING(int, fsync, (int file), file)
