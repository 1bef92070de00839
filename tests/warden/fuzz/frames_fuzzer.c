/* A libFuzzer target: the whole dispatcher, with everything around it made up from the input.
 *
 * The Makefile links the warden's own objects, in which the system calls that reach outside (fork, kill, waitpid, the
 * stream, the clock, epoll_wait) are renamed to the fuzz_ functions here. No process is made. The input is a list of
 * small steps: bytes of the host, what keepers say and write, deaths, time, a stream that takes nothing. Keepers keep
 * to their own protocol, so that the frames that come out have to keep to theirs: `check_frame` is the oracle, beside
 * the sanitizers, and beside what must be left at the end: no task, no allocation, no descriptor. */
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { IN_FD = 9001, OUT_FD, SIGNAL_FD, HOST_FD, FIRST_PID = 5000000, MAX_KEEPERS = 512, MAX_CALLS = 1000 };

#define REQUIRE(condition)                                                                                            \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                   \
            abort();                                                                                                  \
        }                                                                                                             \
    } while (0)

static const uint8_t *data;
static size_t left;

static uint8_t next(void)
{
    return left ? (left--, *data++) : 0;
}

/* ---- keepers ---- */

static struct keeper {
    pid_t pid;
    int fd;
    bool fetch, alive, reaped;
    int status, said;             /* said: the last of M_STARTED, M_EXIT, M_END, M_GONE */
} keepers[MAX_KEEPERS];
static int keeper_count, pending_fd;
static bool pending_fetch, fork_fails;
static int orphans, dead_orphans, stubborn;

static void die(struct keeper *k, int status)
{
    if (!k->alive)
        return;
    k->alive = false;
    k->status = status;
    close(k->fd);
    k->fd = -1;
}

static void say(struct keeper *k, int type, uint32_t a, int32_t b)
{
    struct message m = {.type = (uint32_t)type, .a = a, .b = b};
    send(k->fd, &m, sizeof m, MSG_NOSIGNAL | MSG_DONTWAIT);
    k->said = type;
}

static void output(struct keeper *k, uint8_t how)
{
    struct task *task = tasks_first;
    while (task && task->keeper != k->pid)
        task = task->next;
    if (!task || !task->shared)
        return;
    struct shared_stream *s = &task->shared->stream[how & 1];
    uint64_t end = s->head + (1ULL << (how >> 1) % 22) + next();
    s->reserve = end;
    if (end > settings.keep && settings.spill_cap && s->spill_state == SPILL_NONE)
        s->spill_state = how & 2 ? SPILL_OPEN : SPILL_FAILED;
    if (s->spill_state == SPILL_OPEN && how & 4)
        s->spill_start = s->head / 2;
    if (how != 0x55)
        s->head = end;
    if (atomic_exchange(&task->shared->armed, 0))
        say(k, M_NOTE, 0, 0), k->said = M_STARTED;
}

/* The next thing that this keeper may rightly do. */
static void keeper_step(struct keeper *k, uint8_t what)
{
    static uint8_t bytes[4096];
    if (!k->alive)
        return;
    if (k->fetch) {
        if (what & 1)
            die(k, (what & 6) == 6 ? 9 : (what & 6) << 8);
        else if (write(k->fd, bytes, 1 + what * 16) < 0)
            die(k, EPIPE << 8);
        return;
    }
    int said = k->said;
    if (what % 8 == 7) {
        die(k, 9);
    } else if (said == 0 && what % 8 == 6) {
        say(k, M_FAILED, 1 + what / 8 % 4, 2);
        die(k, 0);
    } else if (said == 0) {
        say(k, M_STARTED, 4711, 0);
    } else if (said == M_STARTED && what % 8 < 4) {
        output(k, next());
    } else if (said == M_STARTED) {
        say(k, M_EXIT, what & 8 ? EXIT_EXITED : EXIT_SIGNALLED, 7);
    } else if (said == M_EXIT) {
        struct task *task = tasks_first;
        while (task && task->keeper != k->pid)
            task = task->next;
        for (int i = 0; task && task->shared && i < 2; i++)
            if (task->shared->stream[i].spill_state == SPILL_OPEN)
                task->shared->stream[i].spill_state = what & 8 ? SPILL_COMPLETE : SPILL_FAILED;
        say(k, M_END, what & 1, 0);
    } else if (said == M_END) {
        say(k, M_GONE, what & 16 ? what : 0, 0);
        die(k, 0);
    }
}

/* ---- what the dispatcher calls in place of the system ---- */

static uint64_t clock_us;
static const uint8_t *host_bytes;
static size_t host_left, out_room;
static bool host_eof, out_broken, host_dead;
static struct epoll_event in_watch, out_watch, signal_watch, host_watch;
static bool in_on, out_on, signal_on, host_on;
static int calls;
static bool ended_before;         /* a session that was ending already may run out of time with tasks left */

pid_t fuzz_fork(void)
{
    if (fork_fails || keeper_count == MAX_KEEPERS) {
        close(pending_fd);
        pending_fd = -1;
        errno = EAGAIN;
        return -1;
    }
    struct keeper *k = &keepers[keeper_count++];
    *k = (struct keeper){.pid = FIRST_PID + keeper_count, .fd = pending_fd, .fetch = pending_fetch, .alive = true};
    pending_fd = -1;
    return k->pid;
}

int fuzz_socketpair(int domain, int type, int protocol, int ends[2])
{
    int result = socketpair(domain, type, protocol, ends);
    pending_fd = result ? -1 : dup(ends[1]);
    pending_fetch = false;
    return result;
}

int fuzz_pipe2(int ends[2], int flags)
{
    int result = pipe2(ends, flags);
    pending_fd = result ? -1 : dup(ends[1]);
    if (!result)
        fcntl(pending_fd, F_SETFL, O_WRONLY | O_NONBLOCK);
    pending_fetch = true;
    return result;
}

int fuzz_kill(pid_t pid, int number)
{
    REQUIRE(pid >= FIRST_PID && number == SIGKILL);
    if (pid < FIRST_PID + 1000000) {
        REQUIRE(pid - FIRST_PID <= keeper_count);
        struct keeper *k = &keepers[pid - FIRST_PID - 1];
        REQUIRE(!k->reaped);
        die(k, SIGKILL);
    } else if (orphans > stubborn) {
        orphans--;
        dead_orphans++;
    }
    return 0;
}

pid_t fuzz_waitpid(pid_t pid, int *status, int options)
{
    (void)options;
    REQUIRE(pid == -1);
    bool any = orphans > 0;
    for (int i = 0; i < keeper_count; i++) {
        if (!keepers[i].alive && !keepers[i].reaped) {
            keepers[i].reaped = true;
            if (status)
                *status = keepers[i].status;
            return keepers[i].pid;
        }
        any = any || keepers[i].alive;
    }
    if (dead_orphans) {
        if (status)
            *status = 9;
        return FIRST_PID + 1000000 + dead_orphans--;
    }
    errno = ECHILD;
    return any ? 0 : -1;
}

void *fuzz_malloc(size_t size);

int fuzz_direct_children(pid_t **list)
{
    int n = 0;
    *list = fuzz_malloc((size_t)(keeper_count + orphans + 1) * sizeof **list);
    for (int i = 0; i < keeper_count; i++)
        if (!keepers[i].reaped)
            (*list)[n++] = keepers[i].pid;
    for (int i = 0; i < orphans; i++)
        (*list)[n++] = FIRST_PID + 1000000 + i;
    return n;
}

int fuzz_clock_gettime(clockid_t id, struct timespec *t)
{
    (void)id;
    t->tv_sec = (time_t)(clock_us / 1000000);
    t->tv_nsec = (long)(clock_us % 1000000 * 1000);
    return 0;
}

int fuzz_nanosleep(const struct timespec *t, struct timespec *rest)
{
    (void)rest;
    clock_us += (uint64_t)t->tv_sec * 1000000 + (uint64_t)t->tv_nsec / 1000 + 1;
    return 0;
}

_Noreturn void fuzz__exit(int status)
{
    fprintf(stderr, "_exit(%d)\n", status);
    abort();
}

int fuzz_signalfd(int fd, const sigset_t *mask, int flags)
{
    (void)fd, (void)mask, (void)flags;
    return SIGNAL_FD;
}

int fuzz_epoll_ctl(int ep, int operation, int fd, struct epoll_event *event)
{
    struct epoll_event *where = fd == IN_FD ? &in_watch : fd == OUT_FD ? &out_watch : fd == SIGNAL_FD ? &signal_watch : &host_watch;
    bool *on = fd == IN_FD ? &in_on : fd == OUT_FD ? &out_on : fd == SIGNAL_FD ? &signal_on : &host_on;
    if (fd < IN_FD || fd > HOST_FD)
        return epoll_ctl(ep, operation, fd, event);
    REQUIRE(operation == EPOLL_CTL_ADD ? !*on : *on);
    *on = operation != EPOLL_CTL_DEL;
    if (event)
        *where = *event;
    return 0;
}

ssize_t fuzz_read(int fd, void *buffer, size_t size)
{
    REQUIRE(size || fd != IN_FD);
    if (fd == IN_FD && host_left) {
        size_t n = host_left < size ? host_left : size;
        memcpy(buffer, host_bytes, n);
        host_bytes += n;
        host_left -= n;
        return (ssize_t)n;
    }
    if (fd == IN_FD && host_eof)
        return 0;
    if (fd == IN_FD || fd == SIGNAL_FD) {
        errno = EAGAIN;
        return -1;
    }
    return read(fd, buffer, size);
}

void check_output(const uint8_t *bytes, size_t size);
void check_reset(void);

ssize_t fuzz_write(int fd, const void *bytes, size_t size)
{
    if (fd != OUT_FD)
        return write(fd, bytes, size);
    if (out_broken || !out_room) {
        errno = out_broken ? EPIPE : EAGAIN;
        return -1;
    }
    size_t n = size < out_room ? size : out_room;
    out_room -= n;
    check_output(bytes, n);
    return (ssize_t)n;
}

static int gather(int ep, struct epoll_event *events, int max, uint8_t order)
{
    int n = 0;
    bool dead = dead_orphans > 0;
    for (int i = 0; i < keeper_count; i++)
        dead = dead || (!keepers[i].alive && !keepers[i].reaped);
    for (int turn = 0; turn < 3; turn++) {
        int what = (turn + order) % 3;
        if (what == 0 && dead && signal_on)
            events[n++] = signal_watch;
        else if (what == 1 && in_on && in_watch.events & EPOLLIN && (host_left || host_eof))
            events[n++] = in_watch;
        else if (what == 2) {
            int more = epoll_wait(ep, events + n, max - n - 4, 0);
            n += more > 0 ? more : 0;
        }
    }
    if (out_on && (out_room || out_broken))
        events[n++] = out_watch;
    if (host_on && host_dead)
        events[n++] = host_watch;
    return n;
}

int fuzz_epoll_wait(int ep, struct epoll_event *events, int max, int timeout)
{
    REQUIRE(timeout >= -1);
    clock_us += 50;
    if (host_left && in_on && in_watch.events & EPOLLIN)
        return gather(ep, events, max, 0);
    if (!left) {                  /* the end: nothing may hold it up any more, and time passes */
        host_eof = true;
        out_room = SIZE_MAX;
        stubborn = 0;
        clock_us += 100000;
        if (++calls == 1)
            ended_before = shutting_down;
        REQUIRE(calls < MAX_CALLS);
        for (int i = 0; i < keeper_count; i++)
            die(&keepers[i], 0);
        return gather(ep, events, max, (uint8_t)calls);
    }
    uint8_t op = next(), what;
    switch (op & 7) {
    case 0: case 1: {             /* a good header in front of what follows */
        static uint8_t frame[HEADER_SIZE + 256];
        uint8_t size = next();
        memset(frame, 0, HEADER_SIZE);
        frame[0] = size;
        frame[4] = op >> 4;
        frame[5] = op >> 4 == F_CREDIT ? 1 + (op >> 3 & 1) : 0;
        frame[8] = op & 1 ? next() % 8 : 0;
        for (int i = 0; i < size; i++)
            frame[HEADER_SIZE + i] = next();
        if (!host_left)
            host_bytes = frame, host_left = HEADER_SIZE + (size_t)size;
        break;
    }
    case 2: {                     /* bytes as they are */
        size_t size = (size_t)next() * (op & 8 ? 64 : 1);
        size = size < left ? size : left;
        if (!host_left) {
            host_bytes = data;
            host_left = size;
        }
        data += size;
        left -= size;
        break;
    }
    case 3: case 4:
        what = next();
        if (keeper_count)
            keeper_step(&keepers[keeper_count - 1 - (op >> 3) % (keeper_count < 32 ? keeper_count : 32)], what);
        break;
    case 5:
        for (int i = 0; i < keeper_count; i++)
            keeper_step(&keepers[i], op >> 3);
        break;
    case 6:
        out_room = op & 8 ? (size_t)1 << next() % 24 : SIZE_MAX;
        break;
    default:
        what = next();
        clock_us += what & 1 ? (uint64_t)next() * 10000 : 0;
        orphans += what & 2 ? what >> 5 : 0;
        stubborn = what & 4 ? what >> 6 : 0;
        fork_fails = (what & 8) != 0;
        out_broken = out_broken || what == 0xf0;
        host_dead = host_dead || what == 0xf2;
        host_eof = host_eof || what == 0xf4;
        break;
    }
    return gather(ep, events, max, op >> 5);
}

/* ---- memory ---- */

static void *live[1 << 16];
static int live_count;

void *fuzz_malloc(size_t size)
{
    void *p = malloc(size);
    if (p && live_count < 1 << 16)
        live[live_count++] = p;
    return p;
}

void fuzz_free(void *p)
{
    for (int i = live_count - 1; p && i >= 0; i--)
        if (live[i] == p) {
            live[i] = live[--live_count];
            break;
        }
    free(p);
}

char *fuzz_strdup(const char *text)
{
    size_t size = strlen(text) + 1;
    return memcpy(fuzz_malloc(size), text, size);
}

/* ---- one input ---- */

extern uint64_t __start_wdata[], __stop_wdata[], __start_wbss[], __stop_wbss[];

/* The warden's variables as they were at the start; not by memcpy(), which the redzones between them would stop. */
__attribute__((no_sanitize("address", "coverage"))) static void restore(bool save)
{
    static uint64_t *saved;
    size_t words = (size_t)(__stop_wdata - __start_wdata);
    if (save && !(saved = malloc(words * sizeof *saved)))
        abort();
    for (size_t i = 0; i < words; i++)
        *(save ? &saved[i] : &__start_wdata[i]) = *(save ? &__start_wdata[i] : &saved[i]);
    for (volatile uint64_t *p = __start_wbss; !save && p < __stop_wbss; p++)
        *p = 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static bool saved;
    if (!saved)
        restore(saved = true);
    restore(!saved);
    check_reset();
    data = bytes;
    left = size;
    keeper_count = orphans = dead_orphans = stubborn = calls = live_count = 0;
    fork_fails = host_eof = out_broken = host_dead = in_on = out_on = signal_on = host_on = false;
    host_left = 0;
    out_room = SIZE_MAX;
    clock_us = 1000000;
    pending_fd = -1;
    settings.start_dir = (char *)"/";
    int first = dup(0);
    REQUIRE(first >= 0);
    close(first);
    REQUIRE(dispatch(IN_FD, OUT_FD, HOST_FD) == 0);
    REQUIRE((!task_count && !tasks_first) || ended_before || !calls);
    for (int i = 0; i < keeper_count; i++)
        die(&keepers[i], 0);
    int end = dup(0);
    close(end);
    REQUIRE(task_count || end == first + (first == epoll_fd));   /* no descriptor was left open */
    for (struct task *task; (task = tasks_first);) {
        task->keeper = 0;
        task_free(task);
    }
    tasks_bury();
    close(epoll_fd);
    while (live_count)
        free(live[--live_count]);
    return 0;
}
