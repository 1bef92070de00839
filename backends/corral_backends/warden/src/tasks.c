/* The dispatcher's table of commands: from START to GONE. */
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BUCKETS = 4096, REAPS_PER_ROUND = 1024 };

struct task *tasks_first, *tasks_last;
unsigned task_count;
static struct task *buckets[BUCKETS], *graveyard;
static uint64_t next_tick = UINT64_MAX;
static uint64_t hunt_since;                   /* last death of an orphan; 0: no hunt */

/* ---- the table ---- */

struct task *task_find(uint32_t id)
{
    struct task *task = buckets[id % BUCKETS];
    while (task && task->id != id)
        task = task->chain;
    return task;
}

struct task *task_new(uint32_t id)
{
    struct task *task = xmalloc(sizeof *task);
    *task = (struct task){.id = id, .command_fd = -1, .stdin_fd = -1, .ctl = -1, .prev = tasks_last};
    *(tasks_last ? &tasks_last->next : &tasks_first) = task;
    tasks_last = task;
    task->chain = buckets[id % BUCKETS];
    buckets[id % BUCKETS] = task;
    task_count++;
    return task;
}

static void free_request(struct task *task)
{
    free(task->workdir);
    free(task->command);
    task->workdir = task->env = task->command = NULL;
    if (task->command_fd >= 0)
        close(task->command_fd);
    if (task->stdin_fd >= 0)
        close(task->stdin_fd);
    task->command_fd = task->stdin_fd = -1;
}

static void close_ctl(struct task *task)
{
    if (task->ctl < 0)
        return;
    /* Not by close() alone: a keeper forked a moment ago may still hold a copy, and epoll counts those. */
    if (!task->paused)
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, task->ctl, NULL);
    close(task->ctl);
    task->ctl = -1;
}

void task_free(struct task *task)
{
    struct task **link = &buckets[task->id % BUCKETS];
    while (*link != task)
        link = &(*link)->chain;
    *link = task->chain;
    *(task->prev ? &task->prev->next : &tasks_first) = task->next;
    *(task->next ? &task->next->prev : &tasks_last) = task->prev;
    task_count--;
    free_request(task);
    close_ctl(task);
    if (task->shared)
        munmap(task->shared, task->shared_size);
    task->shared = NULL;
    task->next = graveyard;
    graveyard = task;
}

/* Between two batches of events: an event may still point to a task that another one of its batch has ended. */
void tasks_bury(void)
{
    while (graveyard) {
        struct task *task = graveyard;
        graveyard = task->next;
        free(task);
    }
}

/* ---- starting ---- */

/* The task never ran: one ERROR and its number is over. */
void task_fail(struct task *task, enum error_code code, int error)
{
    static const char *const what[] = {
        [E_WORKDIR] = "the working directory cannot be entered", [E_SHELL] = "bash cannot be run",
        [E_SPAWN] = "no process could be made", [E_TOO_LARGE] = "environment and command are too large",
        [E_REFUSED] = "refused", [E_FILE] = "the file cannot be read", [E_PROTOCOL] = "",
    };
    send_error(task->id, code, error, what[code]);
    task->exited = task->ended = task->gone = true;
    task->exit_sent = task->end_sent = task->gone_sent = true;
    if (!task->keeper && task->ctl < 0)
        task_free(task);
}

static pid_t fork_keeper(struct task *task, int ends[2])
{
    pid_t pid = fork();
    if (pid < 0)
        return pid;
    if (pid == 0)
        return 0;
    close(ends[1]);
    task->keeper = pid;
    task->ctl = ends[0];
    watch(task->ctl, EPOLLIN, task);
    return pid;
}

void task_start(struct task *task)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) {
        task_fail(task, E_SPAWN, errno);
        return;
    }
    task->shared_size = 4096 + 2 * (size_t)settings.ring;
    task->shared = mmap(NULL, task->shared_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (task->shared == MAP_FAILED)
        task->shared = NULL;
    else
        atomic_store(&task->shared->armed, 1);
    task->state = T_RUNNING;
    pid_t pid = task->shared ? fork_keeper(task, ends) : -1;
    if (pid == 0)
        keeper_main(task, ends[1]);
    if (pid < 0) {
        int error = errno;
        close(ends[0]);
        close(ends[1]);
        task_fail(task, E_SPAWN, error);
        return;
    }
    /* Later keepers need not copy the page tables of this one's ring. */
    madvise(task->shared, task->shared_size, MADV_DONTFORK);
    free_request(task);
}

void task_fetch(struct task *task, const char *path, uint64_t offset)
{
    int ends[2];
    task->state = T_FETCHING;
    task->out[0].sent = offset;
    if (pipe2(ends, O_CLOEXEC)) {
        task_fail(task, E_FILE, errno);
        return;
    }
    fcntl(ends[0], F_SETFL, O_RDONLY | O_NONBLOCK);
    pid_t pid = fork_keeper(task, ends);
    if (pid == 0)
        fetch_main(path, offset, ends[1]);
    if (pid < 0) {
        int error = errno;
        close(ends[0]);
        close(ends[1]);
        task_fail(task, E_FILE, error);
    }
}

/* ---- killing ---- */

static void fetch_ended(struct task *task, int status)
{
    int error = WIFEXITED(status) ? WEXITSTATUS(status) : ECANCELED;
    if (error) {
        task_fail(task, E_FILE, error);
    } else {
        task->exited = task->exit_sent = task->ended = task->gone = true;
        task_emit(task);
    }
}

void task_kill(struct task *task, uint32_t grace_ms)
{
    if (task->state == T_ASSEMBLING) {
        task_fail(task, E_REFUSED, ECANCELED);
        return;
    }
    if (task->state == T_FETCHING) {
        if (task->keeper)
            kill(task->keeper, SIGKILL);  /* SIGCHLD does the rest; first of all, lest it ends by EPIPE */
        close_ctl(task);
        if (!task->keeper && !task->gone)
            fetch_ended(task, SIGKILL);
        return;
    }
    if (task->gone)
        return;
    struct message m = {.type = M_KILL, .a = grace_ms};
    if (task->ctl >= 0)
        send(task->ctl, &m, sizeof m, MSG_NOSIGNAL | MSG_DONTWAIT);
    uint64_t deadline = now_ms() + grace_ms + KEEPER_SILENCE_MS;
    if (!task->kill_deadline || deadline < task->kill_deadline)
        task->kill_deadline = deadline;
    if (task->kill_deadline < next_tick)
        next_tick = task->kill_deadline;
}

static bool is_keeper(pid_t pid)
{
    for (struct task *task = tasks_first; task; task = task->next)
        if (task->keeper == pid)
            return true;
    return false;
}

/* A keeper that was killed leaves its tree to us. Its processes are those of our children that are no keepers; they
 * are killed as a keeper would, until there are none, or until none has died for a while. */
static void hunt_orphans(uint64_t now)
{
    pid_t *list;
    uint32_t orphans = 0;
    int count = direct_children(&list);
    for (int i = 0; i < count; i++) {
        if (!is_keeper(list[i])) {
            orphans++;
            kill(list[i], SIGKILL);
        }
    }
    free(list);
    if (orphans && now - hunt_since < STUCK_MS)
        return;
    hunt_since = 0;
    struct task *next;
    for (struct task *task = tasks_first; task; task = next) {
        next = task->next;
        if (!task->keeper_lost || task->keeper || task->hunted)
            continue;
        task->hunted = true;
        if (!task->exited)
            task->exit = (struct message){.a = EXIT_LOST};
        task->exited = task->ended = task->gone = true;
        task->survivors = orphans;
        task_emit(task);
    }
}

/* Time-driven work: silent keepers, the hunt. Returns when to be called again, in monotonic milliseconds. */
uint64_t tasks_tick(uint64_t now)
{
    if (now >= next_tick) {
        next_tick = UINT64_MAX;
        for (struct task *task = tasks_first; task; task = task->next) {
            if (!task->kill_deadline || task->gone || !task->keeper)
                continue;
            if (now >= task->kill_deadline) {
                kill(task->keeper, SIGKILL);
                task->kill_deadline = now + KEEPER_SILENCE_MS;
            }
            if (task->kill_deadline < next_tick)
                next_tick = task->kill_deadline;
        }
    }
    if (hunt_since)
        hunt_orphans(now);
    return hunt_since && now + 2 < next_tick ? now + 2 : next_tick;
}

/* After SIGCHLD: reaps keepers, and orphans that came to us. True when there may be more of them: in a storm of orphans
 * the dead come as fast as they are reaped, and the host must be heard as well. */
bool children_died(void)
{
    int left = REAPS_PER_ROUND;
    for (; left; left--) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG | WUNTRACED);
        if (pid <= 0)
            break;
        struct task *task = tasks_first;
        while (task && task->keeper != pid)
            task = task->next;
        if (WIFSTOPPED(status)) {
            if (task)
                kill(pid, SIGKILL);       /* stopped by what it watches; nobody would ever continue it */
            continue;
        }
        if (!task) {
            if (hunt_since)
                hunt_since = now_ms();
            continue;
        }
        if (task->state == T_FETCHING) {
            if (host_gone)
                close_ctl(task);
            task_readable(task);          /* what is still in its pipe comes before its end */
            task->keeper = 0;
            task->exit.b = status;
            if (task->ctl < 0)
                fetch_ended(task, status);
            continue;
        }
        task->keeper = 0;
        if (task->ctl >= 0)
            task_readable(task);          /* its last words; may free the task */
        else if (task->keeper_lost)
            hunt_since = now_ms();
        else
            task_emit(task);
    }
    if (hunt_since)
        hunt_orphans(now_ms());
    return !left;
}

/* ---- what a keeper says ---- */

static void heard(struct task *task, const struct message *m)
{
    if (task->kill_deadline && task->kill_deadline < now_ms() + KEEPER_SILENCE_MS)
        task->kill_deadline = now_ms() + KEEPER_SILENCE_MS;
    switch (m->type) {
    case M_STARTED:
        task->started = true;
        if (!host_gone) {
            bool alone = !queued();
            put_u32(begin_frame(F_STARTED, 0, task->id, 4), m->a);
            /* Most commands have more to tell within this time, and waking the host costs more than waiting. */
            held_until = alone ? now_ms() + HOLD_MS : 0;
        }
        break;
    case M_FAILED:
        task_fail(task, (enum error_code)m->a, m->b);
        break;
    case M_EXIT:
        task->exit = *m;
        task->exited = true;
        break;
    case M_END:
        task->leftovers = m->a;
        task->ended = true;
        break;
    case M_GONE:
        task->survivors = m->a;
        task->gone = true;
        task->kill_deadline = 0;
        break;
    default:
        break;
    }
}

static void fetch_readable(struct task *task)
{
    struct out_stream *o = &task->out[0];
    while (o->credit) {
        static uint8_t data[MAX_DATA];
        if (queued() >= OUT_HIGH && !host_gone) {
            output_blocked = true;
            break;
        }
        ssize_t n = read(task->ctl, data, o->credit < MAX_DATA ? (size_t)o->credit : MAX_DATA);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) {
            close_ctl(task);
            if (!task->keeper)
                fetch_ended(task, task->exit.b);
            return;
        }
        if (!host_gone)
            memcpy(put_u64(begin_frame(F_DATA, 1, task->id, 8 + (size_t)n), o->sent), data, (size_t)n);
        o->sent += (uint64_t)n;
        o->credit -= (uint64_t)n;
    }
    if (!task->paused) {
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, task->ctl, NULL);   /* with no events asked for, epoll still tells hang-ups */
        task->paused = true;
    }
}

/* The keeper's socket has something, or is closed. */
void task_readable(struct task *task)
{
    if (task->ctl < 0)
        return;
    if (task->state == T_FETCHING) {
        fetch_readable(task);
        return;
    }
    struct message m;
    ssize_t n;
    do {
        n = recv(task->ctl, &m, sizeof m, MSG_DONTWAIT);
        if (n == (ssize_t)sizeof m)
            heard(task, &m);
        /* A keeper that ended without reading our KILL resets the socket: told once, before its last words. */
    } while (n > 0 || (n < 0 && (errno == EINTR || errno == ECONNRESET)));
    if (n < 0 && errno == EAGAIN) {
        task_emit(task);
        return;
    }
    close_ctl(task);
    if (!task->gone) {
        task->keeper_lost = true;
        if (!task->keeper)
            hunt_since = now_ms();
    }
    task_emit(task);
}
