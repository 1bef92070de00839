/* The dispatcher: the one loop that talks to the host. It never waits for a command, a disk, or the host. */
#include "warden.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { IN_SIZE = 64 << 10, END_MARGIN_MS = 2000, BYE_MS = 1000 };

int epoll_fd;
bool host_gone, shutting_down;

static int in_fd, out_fd;
static int in_mark, out_mark, signal_mark, host_mark;   /* their addresses tell events apart */
static bool reading = true, writing;
static uint64_t end_deadline, last_heard;
static uint8_t *input;
static size_t input_size, input_used;

bool watch(int fd, uint32_t events, void *data)
{
    struct epoll_event event = {.events = events, .data.ptr = data};
    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

void rewatch(int fd, uint32_t events, void *data)
{
    struct epoll_event event = {.events = events, .data.ptr = data};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, fd, &event);
}

void send_error(uint32_t task, enum error_code code, int error, const char *message)
{
    if (host_gone)
        return;
    size_t length = strlen(message);
    uint8_t *p = begin_frame(F_ERROR, 0, task, 12 + length);
    p = put_u16(p, (uint16_t)code);
    p = put_u16(p, 0);
    p = put_u32(p, (uint32_t)error);
    put_text(p, message, length);
}

/* ---- ends ---- */

static void kill_everything(uint32_t grace_ms)
{
    struct task *next;
    for (struct task *task = tasks_first; task; task = next) {
        next = task->next;
        task_kill(task, grace_ms);
    }
}

void begin_shutdown(uint32_t grace_ms)
{
    uint64_t deadline = now_ms() + grace_ms + END_MARGIN_MS;
    if (!shutting_down || deadline < end_deadline)
        end_deadline = deadline;
    shutting_down = true;
    kill_everything(grace_ms);
}

static void end_of_host(void)
{
    if (host_gone)
        return;
    host_gone = shutting_down = true;
    outgoing.start = outgoing.end = 0;
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, in_fd, NULL);
    if (writing)
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, out_fd, NULL);
    writing = false;
    end_deadline = now_ms() + END_MARGIN_MS;
    kill_everything(0);
    tasks_resume();                       /* frees those that only waited for the host */
}

void protocol_error(const char *message)
{
    send_error(0, E_PROTOCOL, 0, message);
    flush_queue(out_fd);
    end_of_host();
}

/* Whatever is still below us although every keeper is done: it gets SIGKILL until nothing dies any more. */
static void final_sweep(void)
{
    uint64_t until = now_ms() + END_MARGIN_MS / 4;
    while (now_ms() < until) {
        pid_t *list;
        int count = direct_children(&list);
        for (int i = 0; i < count; i++)
            kill(list[i], SIGKILL);
        free(list);
        pid_t pid;
        while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
            ;
        if (pid < 0 && errno == ECHILD)
            return;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static int finish(void)
{
    final_sweep();
    spill_remove_all();
    if (!host_gone) {
        begin_frame(F_BYE, 0, 0, 0);
        uint64_t until = now_ms() + BYE_MS;
        while (flush_queue(out_fd) == 0 && now_ms() < until)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return 0;
}

/* ---- input ---- */

/* Takes the whole frames off the front of the input. The buffer grows for a large one and shrinks after it. */
static void take_frames(void)
{
    size_t at = 0, awaited = 0;
    while (!host_gone && input_used - at >= HEADER_SIZE) {
        struct reader r = {.at = input + at, .left = 4};
        size_t payload = get_u32(&r), whole = HEADER_SIZE + payload;
        if (payload > MAX_FRAME_IN) {
            protocol_error("a frame is longer than 8 MiB");
            return;
        }
        if (input_used - at < whole) {
            awaited = whole;
            if (whole > input_size) {
                uint8_t *larger = xmalloc(whole);
                memcpy(larger, input + at, input_used - at);
                free(input);
                input = larger;
                input_size = whole;
                input_used -= at;
                at = 0;
            }
            break;
        }
        if (!on_frame(input + at, payload) && !host_gone) {
            protocol_error("a frame is malformed or not allowed here");
            return;
        }
        at += whole;
    }
    input_used -= at;
    if (at && input_used)
        memmove(input, input + at, input_used);
    if (input_size > IN_SIZE && input_used < IN_SIZE && awaited <= IN_SIZE) {
        uint8_t *smaller = xmalloc(IN_SIZE);
        memcpy(smaller, input, input_used);
        free(input);
        input = smaller;
        input_size = IN_SIZE;
    }
}

static void read_host(void)
{
    ssize_t n = read(in_fd, input + input_used, input_size - input_used);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        end_of_host();
        return;
    }
    last_heard = now_ms();
    input_used += (size_t)n;
    take_frames();
}

/* ---- the loop ---- */

static void write_host(void)
{
    if (held_until && now_ms() < held_until)
        return;
    held_until = 0;
    int done = flush_queue(out_fd);
    while (done >= 0 && output_blocked && queued() < OUT_HIGH / 2) {
        output_blocked = false;
        tasks_resume();
        done = flush_queue(out_fd);
    }
    if (done < 0) {
        end_of_host();
        return;
    }
    bool want = queued() != 0;
    if (want != writing) {
        if (want)
            watch(out_fd, EPOLLOUT, &out_mark);
        else
            epoll_ctl(epoll_fd, EPOLL_CTL_DEL, out_fd, NULL);
        writing = want;
    }
    bool read_more = queued() < OUT_STOP_READING;
    if (read_more != reading) {
        rewatch(in_fd, read_more ? EPOLLIN : 0, &in_mark);
        reading = read_more;
    }
}

static int wait_ms(uint64_t now)
{
    uint64_t until = tasks_tick(now);
    if (shutting_down && end_deadline < until)
        until = end_deadline;
    if (settings.lease_ms && !host_gone && last_heard + settings.lease_ms < until)
        until = last_heard + settings.lease_ms;
    if (held_until && held_until < until)
        until = held_until;
    if (until == UINT64_MAX)
        return -1;
    uint64_t wait = until > now ? until - now : 0;
    return wait > 60000 ? 60000 : (int)wait;
}

int dispatch(int in, int out, int host_pidfd)
{
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (signals < 0 || epoll_fd < 0)
        return 2;
    in_fd = in;
    out_fd = out;
    input = xmalloc(IN_SIZE);
    input_size = IN_SIZE;
    last_heard = now_ms();
    /* A file or /dev/null cannot be waited for; it is no stream either. */
    if (!watch(in_fd, EPOLLIN, &in_mark) || !watch(signals, EPOLLIN, &signal_mark))
        return 2;
    if (host_pidfd >= 0)
        watch(host_pidfd, EPOLLIN, &host_mark);

    bool died = false;
    for (;;) {
        if (shutting_down && (!task_count || now_ms() >= end_deadline))
            return finish();
        struct epoll_event events[64];
        int count = epoll_wait(epoll_fd, events, 64, died ? 0 : wait_ms(now_ms()));
        for (int i = 0; i < count; i++) {
            void *what = events[i].data.ptr;
            if (what == &in_mark) {
                if (!host_gone)
                    read_host();
            } else if (what == &signal_mark) {
                struct signalfd_siginfo info;
                while (read(signals, &info, sizeof info) > 0)
                    ;
                died = true;
            } else if (what == &host_mark) {
                epoll_ctl(epoll_fd, EPOLL_CTL_DEL, host_pidfd, NULL);
                end_of_host();
            } else if (what != &out_mark) {
                task_readable(what);
            }
        }
        if (died)
            died = children_died();
        tasks_bury();
        if (settings.lease_ms && now_ms() - last_heard >= settings.lease_ms)
            end_of_host();
        if (!host_gone)
            write_host();
    }
}
