/* The keeper: one process per command. It starts bash, drains the two pipes, tells the leader's exit, kills the tree.
 *
 * A process of its own, so that a slow disk under one command's spill delays no other command, and so that each tree
 * has a subreaper of its own: whatever leaves its session or its parent ends up here and nowhere else. */
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { READS_PER_ROUND = 4, REAPS_PER_ROUND = 1024, FLOOD = 256 << 10 };

struct pump {
    int fd;                               /* -1 at end of file */
    bool spilling, failed;
    struct spill spill;
};

static struct task *task;
static int ctl;
static struct pump pumps[2];
static uint8_t chunk[PUMP_CHUNK];

static pid_t leader;
static bool leader_exited, told_end, cut_off;
static bool tree_gone;                            /* no child is left; none can come any more */
static uint64_t started_us, drain_until;          /* drain_until: ms, 0 before the leader's exit */
static enum { ALIVE, TERM_SENT, KILLING } phase;
static uint64_t kill_at, last_death;

static volatile sig_atomic_t child_died;

static void on_child(int number)
{
    (void)number;
    child_died = 1;
}

uint8_t *shared_ring(struct shared *shared, int stream)
{
    return (uint8_t *)shared + 4096 + (size_t)stream * settings.ring;
}

static void tell(enum message_type type, uint32_t a, int32_t b)
{
    struct message m = {.type = type, .a = a, .b = b};
    send(ctl, &m, sizeof m, MSG_NOSIGNAL);
}

/* ---- starting bash ---- */

static _Noreturn void failed(int code, int error)
{
    tell(M_FAILED, (uint32_t)code, error);
    _exit(0);
}

static void start_leader(void)
{
    int ends[2][2];
    for (int i = 0; i < 2; i++) {
        if (pipe2(ends[i], O_CLOEXEC))
            failed(E_SPAWN, errno);
        fcntl(ends[i][0], F_SETFL, O_RDONLY | O_NONBLOCK);
        pumps[i].fd = ends[i][0];
    }
    int std[3] = {task->stdin_fd >= 0 ? task->stdin_fd : STDIN_FILENO, ends[0][1], ends[1][1]};
    struct failure failure = {0};
    started_us = now_us();
    pid_t pid = spawn_bash(task, std, &failure);
    if (pid < 0)
        failed(failure.code, failure.error);
    leader = pid;
    tell(M_STARTED, (uint32_t)pid, 0);
    close(ends[0][1]);
    close(ends[1][1]);
    if (task->command_fd >= 0)
        close(task->command_fd);
    if (task->stdin_fd >= 0)
        close(task->stdin_fd);
}

/* ---- output ---- */

static void end_spill(int stream)
{
    struct pump *p = &pumps[stream];
    struct shared_stream *s = &task->shared->stream[stream];
    if (!p->spilling && !p->failed)
        return;
    bool whole = p->spilling && spill_close(&p->spill);
    if (!whole && p->spilling)
        unlink(p->spill.path);
    atomic_store(&s->spill_start, whole ? p->spill.start : 0);
    atomic_store(&s->spill_state, whole ? SPILL_COMPLETE : SPILL_FAILED);
    p->spilling = false;
}

static void spill(int stream, const uint8_t *data, size_t size)
{
    struct pump *p = &pumps[stream];
    struct shared_stream *s = &task->shared->stream[stream];
    uint64_t before = atomic_load_explicit(&s->head, memory_order_relaxed);
    if (p->failed || !settings.spill_cap || before + size <= settings.keep)
        return;
    if (!p->spilling) {
        /* The first byte over the bound: all that came so far is still in the ring, which has not wrapped yet. */
        p->spilling = spill_open(&p->spill, task->id, stream);
        if (p->spilling)
            atomic_store(&s->spill_state, SPILL_OPEN);
        if (!p->spilling || !spill_write(&p->spill, shared_ring(task->shared, stream), before))
            p->failed = true;
    }
    if (!p->failed && !spill_write(&p->spill, data, size))
        p->failed = true;
    if (p->failed) {
        p->spilling = false;
        if (p->spill.path)
            unlink(p->spill.path);        /* at once: a full disk is short of just these blocks */
        free(p->spill.path);
        p->spill.path = NULL;
        atomic_store(&s->spill_state, SPILL_FAILED);
    } else {
        atomic_store(&s->spill_start, p->spill.start);
    }
}

static void keep(int stream, const uint8_t *data, size_t size)
{
    struct shared_stream *s = &task->shared->stream[stream];
    uint8_t *ring = shared_ring(task->shared, stream);
    uint64_t head = atomic_load_explicit(&s->head, memory_order_relaxed), end = head + size;
    atomic_store_explicit(&s->reserve, end, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (size > settings.ring) {
        data += size - settings.ring;
        head = end - settings.ring;
        size = settings.ring;
    }
    size_t at = head & (settings.ring - 1), first = settings.ring - at < size ? settings.ring - at : size;
    memcpy(ring + at, data, first);
    memcpy(ring, data + first, size - first);
    atomic_store_explicit(&s->head, end, memory_order_seq_cst);
    if (atomic_exchange(&task->shared->armed, 0))
        tell(M_NOTE, 0, 0);
}

/* Reads what is there, a few chunks at most, so that a flood does not keep us from the other things. */
static void pump(int stream)
{
    struct pump *p = &pumps[stream];
    for (int i = 0; i < READS_PER_ROUND && p->fd >= 0; i++) {
        ssize_t n = read(p->fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) {
            close(p->fd);
            p->fd = -1;
            return;
        }
        if (told_end)
            continue;
        uint64_t before = atomic_load_explicit(&task->shared->stream[stream].head, memory_order_relaxed);
        spill(stream, chunk, (size_t)n);
        keep(stream, chunk, (size_t)n);
        /* Larger pipes are shared out per user and are worth it only for a flood. */
        if (before < FLOOD && before + (uint64_t)n >= FLOOD)
            fcntl(p->fd, F_SETPIPE_SZ, PUMP_CHUNK);
        if ((size_t)n < PIPE_BUF && !leader_exited)
            return;                       /* a short read was all there is: save the call that says EAGAIN */
    }
}

static void finish_output(bool leftovers)
{
    told_end = true;
    end_spill(0);
    end_spill(1);
    tell(M_END, leftovers, 0);
}

/* ---- the tree ---- */

static void told_exit(int status, const struct rusage *usage)
{
    struct message m = {.type = M_EXIT};
    leader_exited = true;
    drain_until = now_ms() + DRAIN_MS;
    m.a = WIFEXITED(status) ? EXIT_EXITED : EXIT_SIGNALLED;
    m.b = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
    m.wall_us = now_us() - started_us;
    m.user_us = (uint64_t)usage->ru_utime.tv_sec * 1000000 + (uint64_t)usage->ru_utime.tv_usec;
    m.system_us = (uint64_t)usage->ru_stime.tv_sec * 1000000 + (uint64_t)usage->ru_stime.tv_usec;
    m.max_rss = (uint64_t)usage->ru_maxrss;
    send(ctl, &m, sizeof m, MSG_NOSIGNAL);
}

/* Reaps what has died, the leader first and of the rest a number: in a storm of processes the dead come as fast as they
 * are reaped, and there are other things to do. */
static void reap(void)
{
    int leader_status;
    struct rusage leader_usage;
    if (!leader_exited && wait4(leader, &leader_status, WNOHANG, &leader_usage) == leader) {
        last_death = now_ms();
        told_exit(leader_status, &leader_usage);
    }
    for (int i = 0; i < REAPS_PER_ROUND; i++) {
        int status;
        struct rusage usage;
        pid_t pid = wait4(-1, &status, WNOHANG, &usage);
        if (pid == 0)
            return;
        if (pid < 0) {
            if (errno == EINTR)
                continue;
            tree_gone = true;
            return;
        }
        last_death = now_ms();
        if (pid == leader && !leader_exited)
            told_exit(status, &usage);
    }
    child_died = 1;                       /* there may be more; SIGCHLD comes only in ppoll(), so this is not lost */
}

static void begin_kill(uint32_t grace_ms)
{
    uint64_t now = now_ms();
    if (phase == KILLING)
        return;
    /* Where it is allowed: each session of a fork storm weighs as much as we do, and would leave us no time. */
    struct sched_param urgent = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &urgent);
    if (grace_ms && phase == ALIVE) {
        phase = TERM_SENT;
        kill_at = now + grace_ms;
        term_tree(leader, !leader_exited);
    } else if (!grace_ms) {
        phase = KILLING;
        last_death = now;
    } else if (now + grace_ms < kill_at) {
        kill_at = now + grace_ms;
    }
}

/* SIGKILL to every direct child. The orphans of those who die become our children, so that this reaches the whole tree
 * without ever signalling a process that somebody else might have reaped. */
static void kill_children(void)
{
    pid_t *list;
    int count = direct_children(&list);
    if (count < 0 && !leader_exited)      /* no /proc: the leader and its group are all we know */
        kill(-leader, SIGKILL);
    for (int i = 0; i < count; i++)
        kill(list[i], SIGKILL);
    free(list);
}

static _Noreturn void gone(uint32_t survivors)
{
    if (!told_end) {
        for (int i = 0; i < 64 && (pumps[0].fd >= 0 || pumps[1].fd >= 0); i++) {
            uint64_t before = atomic_load(&task->shared->stream[0].head) + atomic_load(&task->shared->stream[1].head);
            pump(0);
            pump(1);
            if (before == atomic_load(&task->shared->stream[0].head) + atomic_load(&task->shared->stream[1].head))
                break;
        }
        if (!leader_exited)
            tell(M_EXIT, EXIT_LOST, 0);   /* it took on other credentials, say, and nobody will see its exit */
        finish_output(survivors != 0);
    }
    tell(M_GONE, survivors, 0);
    _exit(0);
}

static void listen_to_dispatcher(void)
{
    struct message m;
    ssize_t n;
    while ((n = recv(ctl, &m, sizeof m, MSG_DONTWAIT)) == (ssize_t)sizeof m)
        if (m.type == M_KILL)
            begin_kill(m.a);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        cut_off = true;                   /* the dispatcher is gone: nobody to tell, nothing to spare */
        begin_kill(0);
    }
}

static int64_t wait_ms(uint64_t now, int rounds)
{
    int64_t wait = -1;
    if (child_died)
        return 0;
    if (phase == TERM_SENT)
        wait = (int64_t)(kill_at > now ? kill_at - now : 0);
    if (phase == KILLING)
        wait = rounds < 8 ? 1 : 5;        /* a death wakes us anyway; this is for children that arrive unannounced */
    if (leader_exited && !told_end && phase == ALIVE) {
        int64_t drain = (int64_t)(drain_until > now ? drain_until - now : 0);
        if (wait < 0 || drain < wait)
            wait = drain;
    }
    return wait;
}

_Noreturn void keeper_main(struct task *the_task, int the_ctl)
{
    task = the_task;
    ctl = the_ctl;
    int kept[] = {ctl, task->command_fd, task->stdin_fd};
    close_all_except(kept, 3);
    /* A group of its own, so that no signal to the dispatcher's group takes both. Not a session: where the scheduler has
     * autogroups, each new session competes as a stranger, and on a busy machine a command took 3 to 6 ms longer. */
    setpgid(0, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1);

    struct sigaction action = {.sa_handler = on_child, .sa_flags = SA_NOCLDSTOP};
    sigset_t child, none;
    sigemptyset(&none);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    sigaction(SIGCHLD, &action, NULL);
    pumps[0].fd = pumps[1].fd = -1;
    start_leader();

    int kill_rounds = 0;
    for (;;) {
        uint64_t now = now_ms();
        int64_t wait = wait_ms(now, kill_rounds);
        struct timespec timeout = {wait / 1000, wait % 1000 * 1000000};
        struct pollfd polled[3] = {
            {.fd = cut_off ? -1 : ctl, .events = POLLIN},
            {.fd = pumps[0].fd, .events = POLLIN},
            {.fd = pumps[1].fd, .events = POLLIN},
        };
        ppoll(polled, 3, wait < 0 ? NULL : &timeout, &none);   /* interrupted: revents stay 0 */
        if (polled[0].revents)
            listen_to_dispatcher();
        pump(0);
        pump(1);
        if (child_died || phase == KILLING) {
            child_died = 0;
            reap();
        }
        now = now_ms();
        if (phase == TERM_SENT && now >= kill_at) {
            phase = KILLING;
            last_death = now;
        }
        if (tree_gone && (phase != ALIVE || told_end))
            gone(0);
        if (phase == KILLING) {
            kill_rounds++;
            kill_children();
            if (now - last_death >= STUCK_MS)
                gone(count_tree());
        } else if (phase == ALIVE && leader_exited && !told_end) {
            /* Exit and end of file are two events: something else may hold the pipes, and is given a moment. */
            pump(0);
            pump(1);
            if ((pumps[0].fd < 0 && pumps[1].fd < 0) || now >= drain_until) {
                finish_output(!tree_gone);
                if (tree_gone)
                    gone(0);
            }
        }
    }
}
