/* Looking at the process tree below this process, and signalling it.
 *
 * SIGKILL goes only to direct children: nobody but us can reap them, so their numbers cannot have been reused, and the
 * children of a killed one become ours. SIGTERM should reach everything at once and so must go to grandchildren, whose
 * numbers may be reused at any moment: those are pinned by a pidfd first and looked at again through the pinned number. */
#include "warden.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* One look at the tree, or one signal to all of it. What a storm hides from TERM in that time, KILL will meet. */
enum { PASS_MS = 20 };

struct pids {
    pid_t *list;
    int count, size;
};

static void add(struct pids *pids, pid_t pid)
{
    if (pids->count == pids->size) {
        pids->size = pids->size ? pids->size * 2 : 64;
        pids->list = realloc(pids->list, (size_t)pids->size * sizeof *pids->list);
        if (!pids->list)
            _exit(70);
    }
    pids->list[pids->count++] = pid;
}

struct stat_line {
    char state;
    pid_t parent, group;
};

/* Parses /proc/PID/stat. The name in parentheses may contain anything, so what counts is its last parenthesis. */
static bool read_stat(pid_t pid, struct stat_line *line)
{
    char path[40], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return false;
    text[n] = '\0';
    const char *end = strrchr(text, ')');
    int parent, group;
    if (!end || sscanf(end + 1, " %c %d %d", &line->state, &parent, &group) != 3)
        return false;
    line->parent = parent;
    line->group = group;
    return true;
}

/* Appends the children that one thread has, as the kernel lists them ("12 34 56 "). False without that file. */
static bool listed_children(pid_t pid, pid_t thread, struct pids *pids)
{
    char path[64], text[4096 + 1];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)pid, (int)thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    size_t kept = 0;
    for (;;) {
        ssize_t n = read(fd, text + kept, sizeof text - 1 - kept);
        if (n <= 0)
            break;
        size_t have = kept + (size_t)n;
        text[have] = '\0';
        char *at = text, *space;
        while ((space = strchr(at, ' '))) {
            add(pids, (pid_t)strtol(at, NULL, 10));
            at = space + 1;
        }
        kept = have - (size_t)(at - text);
        memmove(text, at, kept);
    }
    close(fd);
    return true;
}

/* The same by reading every process, for kernels built without that file. */
static void scanned_children(pid_t pid, struct pids *pids)
{
    DIR *proc = opendir("/proc");
    if (!proc)
        return;
    struct dirent *entry;
    while ((entry = readdir(proc))) {
        struct stat_line line;
        pid_t other = (pid_t)strtol(entry->d_name, NULL, 10);
        if (other > 0 && read_stat(other, &line) && line.parent == pid)
            add(pids, other);
    }
    closedir(proc);
}

/* A child belongs to the thread that forked it, so every thread's list is read. */
static void children_of(pid_t pid, struct pids *pids)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *threads = opendir(path);
    if (!threads)
        return;
    bool listed = true;
    struct dirent *entry;
    while (listed && (entry = readdir(threads))) {
        pid_t thread = (pid_t)strtol(entry->d_name, NULL, 10);
        if (thread > 0 && !listed_children(pid, thread, pids) && access("/proc/self/task", R_OK) == 0)
            listed = thread != pid || access(path, R_OK) != 0;   /* a thread that just ended proves nothing */
    }
    closedir(threads);
    if (!listed)
        scanned_children(pid, pids);
}

/* Our own children, zombies included; the caller frees the list. -1 where /proc is of no use. */
int direct_children(pid_t **list)
{
    struct pids pids = {0};
    if (!listed_children(getpid(), getpid(), &pids)) {
        scanned_children(getpid(), &pids);
        if (!pids.count && access("/proc/self/stat", R_OK)) {
            *list = NULL;
            return -1;
        }
    }
    *list = pids.list;
    return pids.count;
}

/* Everything below us, breadth first. Bounded in time, because a tree that grows as fast as it is read has no end. */
static struct pids whole_tree(void)
{
    struct pids pids = {0};
    struct stat_line line;
    uint64_t until = now_ms() + PASS_MS;
    children_of(getpid(), &pids);
    for (int i = 0; i < pids.count && now_ms() < until; i++)
        if (read_stat(pids.list[i], &line) && line.state != 'Z')   /* the dead have no children any more */
            children_of(pids.list[i], &pids);
    return pids;
}

static void signal_pinned(pid_t pid, int number, pid_t skip_group)
{
    int pin = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pin < 0 && errno != ENOSYS && errno != EPERM)
        return;
    /* Through the pin, the number can no longer change hands unseen: walk up and see that it still ends at us. */
    struct stat_line line;
    if (read_stat(pid, &line) && line.state != 'Z' && (!skip_group || line.group != skip_group)) {
        for (int steps = 0; line.parent != getpid() && line.parent > 1 && steps < 256; steps++)
            if (!read_stat(line.parent, &line))
                break;
        if (line.parent == getpid()) {
            if (pin >= 0)
                syscall(SYS_pidfd_send_signal, pin, number, NULL, 0);
            else
                kill(pid, number);
        }
    }
    if (pin >= 0)
        close(pin);
}

/* TERM to everything, then CONT, since a stopped process does not hear TERM. The leader's group gets its TERM in one
 * call, which no fork in the group can escape; its members are then left out, so that no trap runs twice. */
void term_tree(pid_t leader, bool leader_alive)
{
    struct pids pids = whole_tree();
    if (leader_alive)
        kill(-leader, SIGTERM);
    uint64_t until = now_ms() + PASS_MS;
    for (int i = 0; i < pids.count && now_ms() < until; i++)
        signal_pinned(pids.list[i], SIGTERM, leader_alive ? leader : 0);
    if (leader_alive)
        kill(-leader, SIGCONT);
    until = now_ms() + PASS_MS;
    for (int i = 0; i < pids.count && now_ms() < until; i++)
        signal_pinned(pids.list[i], SIGCONT, leader_alive ? leader : 0);
    free(pids.list);
}

/* How many processes below us are more than zombies. */
uint32_t count_tree(void)
{
    struct pids pids = whole_tree();
    uint32_t alive = 0;
    for (int i = 0; i < pids.count; i++) {
        struct stat_line line;
        if (read_stat(pids.list[i], &line) && line.state != 'Z' && line.state != 'X')
            alive++;
    }
    free(pids.list);
    return alive;
}
