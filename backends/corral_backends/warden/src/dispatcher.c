/* The dispatcher: the one loop that talks to the host. It never waits for a command, a disk, or the host. */
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

enum { IN_SIZE = 64 << 10, END_MARGIN_MS = 2000, BYE_MS = 1000 };

int epoll_fd;
bool host_gone;

static int in_fd, out_fd;
static int in_mark, out_mark, signal_mark, host_mark;   /* their addresses tell events apart */
static bool greeted, shutting_down, reading = true, writing;
static uint64_t end_deadline, last_heard;
static uint8_t *input;
static size_t input_size, input_used;

void watch(int fd, uint32_t events, void *data)
{
    struct epoll_event event = {.events = events, .data.ptr = data};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
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

static void protocol_error(const char *message)
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

/* ---- frames from the host ---- */

static char *optional_text(struct reader *r)
{
    size_t length;
    const char *text = get_text(r, &length);
    if (memchr(text, '\0', length))
        r->bad = true;
    return length && !r->bad ? xstrndup(text, length) : NULL;
}

static void send_ready(void)
{
    struct utsname name;
    const char *machine = uname(&name) ? "" : name.machine, *dir = settings.start_dir, *spill = settings.spill_dir;
    size_t size = 16 + 12 + strlen(machine) + strlen(dir) + strlen(spill);
    uint8_t *p = begin_frame(F_READY, 0, 0, size);
    p = put_u16(p, PROTOCOL_VERSION);
    p = put_u16(p, 0);
    p = put_u32(p, (uint32_t)getpid());
    p = put_u32(p, (uint32_t)geteuid());
    p = put_u32(p, 0);
    p = put_text(p, machine, strlen(machine));
    p = put_text(p, dir, strlen(dir));
    put_text(p, spill, strlen(spill));
}

static bool on_hello(struct reader *r)
{
    if (greeted || r->left < 8 || memcmp(r->at, "CRRL", 4) != 0)
        return false;
    get_u32(r);
    uint16_t version = get_u16(r);
    if (version != PROTOCOL_VERSION) {
        char text[80];
        snprintf(text, sizeof text, "the host speaks protocol %u, this warden %d", version, PROTOCOL_VERSION);
        protocol_error(text);
        return true;
    }
    if (get_u16(r))
        return false;
    settings.lease_ms = get_u32(r);
    settings.keep = get_u32(r);
    settings.spill_cap = get_u64(r);
    settings.spill_total = get_u64(r);
    char *parent = optional_text(r);
    settings.shell_option = optional_text(r);
    size_t size;
    const char *block = get_text(r, &size);
    bool good = !r->bad && !r->left && settings.keep && settings.keep <= MAX_RING && environment_block_ok(block, size)
        && (!parent || parent[0] == '/');
    if (good) {
        for (settings.ring = 4096; settings.ring < settings.keep;)
            settings.ring *= 2;
        settings.environment = base_environment(block, size);
        settings.shell = find_shell(settings.shell_option);
        spill_choose_directory(parent ? parent : "", parent ? strlen(parent) : 0);
        greeted = true;
        send_ready();
    }
    free(parent);
    return good;
}

/* An anonymous file for what is too long for an argument or a pipe. Older kernels do not know NOEXEC_SEAL. */
static int anonymous_file(const char *name)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_NOEXEC_SEAL);
    return fd < 0 && errno == EINVAL ? memfd_create(name, MFD_CLOEXEC) : fd;
}

static void start_when_complete(struct task *task)
{
    if (task->command_have == task->command_size && task->stdin_have == task->stdin_size)
        task_start(task);
}

static bool append_command(struct task *task, const void *data, size_t size)
{
    if (size > task->command_size - task->command_have)
        return false;
    if (task->command) {
        memcpy(task->command + task->command_have, data, size);
    } else if (!write_all(task->command_fd, data, size)) {
        task_fail(task, E_SPAWN, errno);
        return true;
    }
    task->command_have += size;
    start_when_complete(task);
    return true;
}

static bool on_start(uint32_t id, struct reader *r)
{
    uint32_t flags = get_u32(r);
    uint64_t command_size = get_u64(r), stdin_size = get_u64(r), credit = get_u64(r);
    size_t workdir_size, env_size;
    const char *workdir = get_text(r, &workdir_size), *env = get_text(r, &env_size);
    if (r->bad || flags > 1 || command_size > MAX_TEXT_BYTES || stdin_size > MAX_TEXT_BYTES || (!flags && stdin_size)
        || memchr(workdir, '\0', workdir_size) || !environment_block_ok(env, env_size) || !id || task_find(id)
        || r->left > command_size || memchr(r->at, '\0', r->left))
        return false;
    if (shutting_down || task_count >= MAX_TASKS) {
        send_error(id, E_REFUSED, 0, shutting_down ? "shutting down" : "too many commands at once");
        return true;
    }
    struct task *task = task_new(id);
    task->out[0].credit = task->out[1].credit = credit < MAX_CREDIT ? credit : MAX_CREDIT;
    task->command_size = command_size;
    task->stdin_size = stdin_size;
    task->workdir = xmalloc(workdir_size + 1 + env_size);
    memcpy(task->workdir, workdir, workdir_size);
    task->workdir[workdir_size] = '\0';
    task->env = task->workdir + workdir_size + 1;
    memcpy(task->env, env, env_size);
    task->env_size = env_size;
    if (command_size <= INLINE_COMMAND) {
        task->command = xmalloc((size_t)command_size + 1);
        task->command[command_size] = '\0';
    } else {
        task->command_fd = anonymous_file("corral-command");
    }
    if (flags)
        task->stdin_fd = anonymous_file("corral-stdin");
    if ((!task->command && task->command_fd < 0) || (flags && task->stdin_fd < 0)) {
        task_fail(task, E_SPAWN, errno);
        return true;
    }
    return append_command(task, r->at, r->left);
}

static bool on_text(uint32_t id, struct reader *r)
{
    struct task *task = task_find(id);
    if (!task)
        return true;                      /* it failed while the rest was on its way */
    if (task->state != T_ASSEMBLING || memchr(r->at, '\0', r->left))
        return false;
    return append_command(task, r->at, r->left);
}

static bool on_stdin(uint32_t id, struct reader *r)
{
    struct task *task = task_find(id);
    if (!task)
        return true;
    if (task->state != T_ASSEMBLING || r->left > task->stdin_size - task->stdin_have)
        return false;
    if (!write_all(task->stdin_fd, r->at, r->left)) {
        task_fail(task, E_SPAWN, errno);
        return true;
    }
    task->stdin_have += r->left;
    start_when_complete(task);
    return true;
}

static bool on_fetch(uint32_t id, struct reader *r)
{
    uint64_t offset = get_u64(r), credit = get_u64(r);
    char *path = optional_text(r);
    bool good = !r->bad && !r->left && path && path[0] == '/' && offset < (uint64_t)INT64_MAX && id && !task_find(id);
    if (good && (shutting_down || task_count >= MAX_TASKS)) {
        send_error(id, E_REFUSED, 0, "shutting down, or too many commands at once");
    } else if (good) {
        struct task *task = task_new(id);
        task->out[0].credit = credit < MAX_CREDIT ? credit : MAX_CREDIT;
        task_fetch(task, path, offset);
    }
    free(path);
    return good;
}

static bool on_small_frame(uint8_t type, uint8_t flags, uint32_t id, struct reader *r)
{
    struct task *task = task_find(id);
    uint64_t token;
    uint32_t value;
    switch (type) {
    case F_KILL:
        value = get_u32(r);
        if (r->bad || r->left)
            return false;
        if (task)
            task_kill(task, value);
        return true;
    case F_CREDIT:
        value = get_u32(r);
        if (r->bad || r->left || (flags != 1 && flags != 2) || (task && task->state == T_ASSEMBLING))
            return false;
        if (task)
            task_credit(task, flags - 1, value);
        return true;
    case F_PING:
        token = get_u64(r);
        if (r->bad || r->left)
            return false;
        put_u64(begin_frame(F_PONG, 0, 0, 8), token);
        return true;
    case F_SHUTDOWN:
        value = get_u32(r);
        if (r->bad || r->left)
            return false;
        if (!shutting_down || now_ms() + value + END_MARGIN_MS < end_deadline)
            end_deadline = now_ms() + value + END_MARGIN_MS;
        shutting_down = true;
        kill_everything(value);
        return true;
    case F_FORGET:
        if (r->left)
            return false;
        task_forget(id);
        return true;
    default:
        return false;
    }
}

static bool on_frame(const uint8_t *frame, size_t payload)
{
    uint8_t type = frame[4], flags = frame[5];
    struct reader r = {.at = frame + 8, .left = 4};
    uint32_t id = get_u32(&r);
    r = (struct reader){.at = frame + HEADER_SIZE, .left = payload};
    if (frame[6] || frame[7] || (flags && type != F_CREDIT) || (type != F_HELLO && !greeted))
        return false;
    switch (type) {
    case F_HELLO:
        return on_hello(&r);
    case F_START:
        return on_start(id, &r);
    case F_TEXT:
        return on_text(id, &r);
    case F_STDIN:
        return on_stdin(id, &r);
    case F_FETCH:
        return on_fetch(id, &r);
    default:
        return on_small_frame(type, flags, id, &r);
    }
}

/* Takes the whole frames off the front of the input. The buffer grows for a large one and shrinks after it. */
static void take_frames(void)
{
    size_t at = 0;
    while (!host_gone && input_used - at >= HEADER_SIZE) {
        struct reader r = {.at = input + at, .left = 4};
        size_t payload = get_u32(&r), whole = HEADER_SIZE + payload;
        if (payload > MAX_FRAME_IN) {
            protocol_error("a frame is longer than 8 MiB");
            return;
        }
        if (input_used - at < whole) {
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
    if (input_size > IN_SIZE && input_used < IN_SIZE) {
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
    watch(in_fd, EPOLLIN, &in_mark);
    watch(signals, EPOLLIN, &signal_mark);
    if (host_pidfd >= 0)
        watch(host_pidfd, EPOLLIN, &host_mark);

    for (;;) {
        if (shutting_down && (!task_count || now_ms() >= end_deadline))
            return finish();
        struct epoll_event events[64];
        int count = epoll_wait(epoll_fd, events, 64, wait_ms(now_ms()));
        for (int i = 0; i < count; i++) {
            void *what = events[i].data.ptr;
            if (what == &in_mark) {
                if (!host_gone)
                    read_host();
            } else if (what == &signal_mark) {
                struct signalfd_siginfo info;
                while (read(signals, &info, sizeof info) > 0)
                    ;
                children_died();
            } else if (what == &host_mark) {
                epoll_ctl(epoll_fd, EPOLL_CTL_DEL, host_pidfd, NULL);
                end_of_host();
            } else if (what != &out_mark) {
                task_readable(what);
            }
        }
        tasks_bury();
        if (settings.lease_ms && now_ms() - last_heard >= settings.lease_ms)
            end_of_host();
        if (!host_gone)
            write_host();
    }
}
