/* Small helpers without state. */
#include "warden.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

uint64_t now_ms(void)
{
    return now_us() / 1000;
}

void *xmalloc(size_t size)
{
    void *p = malloc(size ? size : 1);
    if (!p)
        _exit(70);                /* the keepers see the end of their socket and kill their trees */
    return p;
}

char *xstrndup(const char *text, size_t length)
{
    char *copy = xmalloc(length + 1);
    memcpy(copy, text, length);
    copy[length] = '\0';
    return copy;
}

bool write_all(int fd, const void *data, size_t size)
{
    const char *p = data;
    while (size) {
        ssize_t n = write(fd, p, size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        p += n;
        size -= (size_t)n;
    }
    return true;
}

static void close_range_slow(unsigned first, unsigned last)
{
    struct rlimit limit;
    if (last == ~0U) {
        if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur > 1 << 20)
            limit.rlim_cur = 1 << 20;
        last = (unsigned)limit.rlim_cur;
    }
    for (unsigned fd = first; fd <= last; fd++)
        close((int)fd);
}

static void close_between(unsigned first, unsigned last)
{
    if (first > last)
        return;
#ifdef SYS_close_range
    if (syscall(SYS_close_range, first, last, 0) == 0)
        return;
#endif
    close_range_slow(first, last);
}

/* Closes every descriptor from 3 up but those in `keep` (at most 8, any order, -1 is skipped). A keeper must hold
 * nothing of the dispatcher's: one stray copy of the stream, and the host's end would never be seen. */
void close_all_except(const int *keep, int count)
{
    int sorted[8], n = 0;
    for (int i = 0; i < count; i++) {
        if (keep[i] < 3)
            continue;
        int at = n++;
        while (at > 0 && sorted[at - 1] > keep[i]) {
            sorted[at] = sorted[at - 1];
            at--;
        }
        sorted[at] = keep[i];
    }
    unsigned from = 3;
    for (int i = 0; i < n; i++) {
        if ((unsigned)sorted[i] > from)
            close_between(from, (unsigned)sorted[i] - 1);
        from = (unsigned)sorted[i] + 1;
    }
    close_between(from, ~0U);
}

/* Every signal to its default, none blocked: commands must not inherit what the host ignored. */
void reset_signals(void)
{
    for (int number = 1; number < NSIG; number++)
        if (number != SIGKILL && number != SIGSTOP)
            signal(number, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}
