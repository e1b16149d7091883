// An LD_PRELOAD library that counts the write-side system calls of a process and makes one of them fail, or ends the
// process there. Silent until shim_arm() is called; calls on standard streams never count.
//
//   shim_arm(name, nth, action, err)  from now on, at the nth call (1 is the first, 0 every one) of that name ("*": any
//                                     that writes): EXIT ends the process before the call, TEAR after half of a write,
//                                     FAIL sets errno, TRACE does nothing
//   shim_trace()                      what was called since: one "name path [other path]" per line

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { IDLE, EXIT, TEAR, FAIL, TRACE };

static char wanted[32];
static int action = IDLE, nth, err, seen;
static char trace[1 << 20];
static size_t used;

void shim_arm(const char* name, int which, int what, int error) {
  snprintf(wanted, sizeof wanted, "%s", name);
  nth = which, err = error, seen = 0, used = 0, trace[0] = 0;
  action = what;
}

const char* shim_trace(void) { return trace; }

static void resolve(int fd, const char* path, char* out, size_t size) {
  char link[64];
  if (path && path[0] == '/') {
    snprintf(out, size, "%s", path);
    return;
  }
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  char base[2048] = "";
  ssize_t length = fd == AT_FDCWD ? -1 : readlink(link, base, sizeof base - 1);
  base[length > 0 ? length : 0] = 0;
  snprintf(out, size, "%s%s%s", base, path ? "/" : "", path ? path : "");
}

// True when the armed fault hits this call.
static int hit(const char* name, int fd, const char* path, int fd2, const char* path2) {
  if (action == IDLE) return 0;
  char first[4096], second[4096] = "";
  resolve(fd, path, first, sizeof first);
  if (path2) resolve(fd2, path2, second, sizeof second);
  if (used < sizeof trace - 8192) used += sprintf(trace + used, "%s %s%s%s\n", name, first, path2 ? " " : "", second);
  int reads = strcmp(name, "read") == 0 || strcmp(name, "open_read") == 0;
  if (strcmp(wanted, name) != 0 && (reads || strcmp(wanted, "*") != 0)) return 0;
  if (action == TRACE) return 0;
  ++seen;
  if (nth != 0 && seen != nth) return 0;
  if (action == EXIT) _exit(77);
  return 1;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

static int open_any(const char* symbol, int at, const char* path, int flags, mode_t mode) {
  int writes = (flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY;
  if (hit(writes ? "open" : "open_read", at, path, 0, NULL) && action != TEAR) return errno = err, -1;
  return REAL(int, symbol, int, const char*, int, ...)(at, path, flags, mode);
}

#define DEFINE_OPEN(name)                                         \
  int name(const char* path, int flags, ...) {                    \
    va_list list;                                                 \
    va_start(list, flags);                                        \
    mode_t mode = va_arg(list, mode_t);                           \
    va_end(list);                                                 \
    return open_any("openat64", AT_FDCWD, path, flags, mode);     \
  }
#define DEFINE_OPENAT(name)                                       \
  int name(int at, const char* path, int flags, ...) {            \
    va_list list;                                                 \
    va_start(list, flags);                                        \
    mode_t mode = va_arg(list, mode_t);                           \
    va_end(list);                                                 \
    return open_any("openat64", at, path, flags, mode);           \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

ssize_t write(int fd, const void* data, size_t size) {
  if (fd > 2 && hit("write", fd, NULL, 0, NULL)) {
    if (action != TEAR) return errno = err, -1;
    REAL(ssize_t, "write", int, const void*, size_t)(fd, data, size / 2);
    _exit(77);
  }
  return REAL(ssize_t, "write", int, const void*, size_t)(fd, data, size);
}

ssize_t read(int fd, void* data, size_t size) {
  if (fd > 2 && hit("read", fd, NULL, 0, NULL) && action != TEAR) return errno = err, -1;
  return REAL(ssize_t, "read", int, void*, size_t)(fd, data, size);
}

// Only where it is the call that fails; the descriptor is gone then, too, as on Linux.
int close(int fd) {
  int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "close");
  if (fd > 2 && action == FAIL && strcmp(wanted, "close") == 0 && hit("close", fd, NULL, 0, NULL))
    return real(fd), errno = err, -1;
  return real(fd);
}

// A call that takes (fd, ...) or (folder, path, ...): fails, or goes on.
#define DEFINE(type, name, label, params, args, fd, path, fd2, path2)                       \
  type name params {                                                                        \
    if (hit(label, fd, path, fd2, path2) && action != TEAR) return errno = err, (type)-1;   \
    return ((type(*) params)dlsym(RTLD_NEXT, #name))args;                                   \
  }
DEFINE(int, fsync, "fsync", (int fd), (fd), fd, NULL, 0, NULL)
DEFINE(int, flock, "flock", (int fd, int how), (fd, how), fd, NULL, 0, NULL)
DEFINE(int, ftruncate, "ftruncate", (int fd, off_t size), (fd, size), fd, NULL, 0, NULL)
DEFINE(int, ftruncate64, "ftruncate", (int fd, off_t size), (fd, size), fd, NULL, 0, NULL)
DEFINE(int, fchmod, "fchmod", (int fd, mode_t mode), (fd, mode), fd, NULL, 0, NULL)
DEFINE(int, futimens, "utime", (int fd, const struct timespec t[2]), (fd, t), fd, NULL, 0, NULL)
DEFINE(ssize_t, pwrite, "pwrite", (int fd, const void* d, size_t n, off_t o), (fd, d, n, o), fd, NULL, 0, NULL)
DEFINE(ssize_t, pwrite64, "pwrite", (int fd, const void* d, size_t n, off_t o), (fd, d, n, o), fd, NULL, 0, NULL)
DEFINE(int, mkdir, "mkdir", (const char* p, mode_t m), (p, m), AT_FDCWD, p, 0, NULL)
DEFINE(int, mkdirat, "mkdir", (int at, const char* p, mode_t m), (at, p, m), at, p, 0, NULL)
DEFINE(int, chmod, "chmod", (const char* p, mode_t m), (p, m), AT_FDCWD, p, 0, NULL)
DEFINE(int, fchmodat, "chmod", (int at, const char* p, mode_t m, int f), (at, p, m, f), at, p, 0, NULL)
DEFINE(int, unlink, "unlink", (const char* p), (p), AT_FDCWD, p, 0, NULL)
DEFINE(int, unlinkat, (f & AT_REMOVEDIR) ? "rmdir" : "unlink", (int at, const char* p, int f), (at, p, f), at, p, 0, NULL)
DEFINE(int, rmdir, "rmdir", (const char* p), (p), AT_FDCWD, p, 0, NULL)
DEFINE(int, rename, "rename", (const char* a, const char* b), (a, b), AT_FDCWD, a, AT_FDCWD, b)
DEFINE(int, renameat, "rename", (int x, const char* a, int y, const char* b), (x, a, y, b), x, a, y, b)
