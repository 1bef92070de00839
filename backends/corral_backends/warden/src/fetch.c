/* A child that copies one file into a pipe. A process, because reading a file may block for as long as its disk likes. */
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static uint8_t buffer[128 << 10];

/* Exits with 0, or with the error number of what went wrong. */
_Noreturn void fetch_main(const char *path, uint64_t offset, int out)
{
    close_all_except(&out, 1);
    reset_signals();
    signal(SIGPIPE, SIG_IGN);
    struct stat info;
    /* O_NONBLOCK: opening a FIFO without a writer must not wait. */
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info))
        _exit(errno);
    if (S_ISDIR(info.st_mode))
        _exit(EISDIR);
    if (!S_ISREG(info.st_mode))
        _exit(EINVAL);                    /* a device or a FIFO has no end to wait for */
    size_t ours = strlen(settings.spill_dir);
    bool is_spill = strncmp(path, settings.spill_dir, ours) == 0 && path[ours] == '/';
    off_t data = is_spill ? lseek(fd, (off_t)offset, SEEK_DATA) : (off_t)offset;
    if (data > (off_t)offset)
        _exit(ENODATA);                   /* the head was released: zeros here were never written by a command */
    if (lseek(fd, (off_t)offset, SEEK_SET) < 0)
        _exit(errno);
    for (;;) {
        ssize_t n = read(fd, buffer, sizeof buffer);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            _exit(errno);
        if (n == 0)
            _exit(0);
        /* The head may have been released while we read: looked at afterwards, since it only ever grows. */
        if (is_spill && lseek(fd, (off_t)offset, SEEK_DATA) > (off_t)offset)
            _exit(ENODATA);
        offset += (uint64_t)n;
        lseek(fd, (off_t)offset, SEEK_SET);
        if (!write_all(out, buffer, (size_t)n))
            _exit(errno);
    }
}
