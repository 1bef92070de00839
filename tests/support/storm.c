/* Trees that move faster than anybody can list them, for the tests of tree killing.
 *
 *   storm chain WIDTH SECONDS same|setsid   WIDTH walkers; each forks, exits, and goes on as its child: a pid lives
 *                                           about 0.1 ms. With `setsid` every step takes a session of its own.
 *   storm hydra HEADS SECONDS               HEADS pairs in sessions of their own; whoever of a pair dies is made anew
 *                                           by the other.
 *   storm headless COUNT SECONDS            COUNT processes in sessions of their own whose main thread has ended, so
 *                                           that they look like zombies; another thread goes on and has a child.
 *   storm root COUNT SECONDS                COUNT processes that have become root, which needs a setuid program.
 *
 * Each process of the first generation writes one byte to descriptor 9, a FIFO, once it runs. Everything ends by
 * itself after SECONDS (at most 20) of the monotonic clock, or when the reader of the FIFO is gone, whatever else
 * happens: a failing test must not be able to use up the pids of the machine. The program itself returns at once. */
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double deadline;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void mark(void)
{
    if (write(9, "m", 1) != 1)
        _exit(1); /* nobody watches us */
}

static void expire(void)
{
    struct pollfd line = { .fd = 9 };
    if (now() > deadline || poll(&line, 1, 0) != 0) /* POLLERR: no reader; POLLNVAL: no FIFO */
        _exit(0);
}

/* A fork that failed is retried, slowly, until the deadline. */
static pid_t fork_or_expire(void)
{
    for (;;) {
        expire();
        pid_t pid = fork();
        if (pid >= 0)
            return pid;
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    }
}

static void walk(int own_session)
{
    mark();
    for (;;) {
        if (fork_or_expire() > 0)
            _exit(0);
        if (own_session)
            setsid();
    }
}

/* Waits for `signal`, blocked by main, for at most 100 ms. */
static void nap(int signal)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, signal);
    sigtimedwait(&set, NULL, &(struct timespec){ .tv_nsec = 100000000 });
    expire();
}

static void head(void)
{
    int first = 1;
    setsid();
    mark();
    for (;;) {
        pid_t self = getpid();
        pid_t child = fork_or_expire();
        if (child > 0) {
            while (waitpid(child, NULL, WNOHANG) == 0)
                nap(SIGCHLD);
            first = 0;
            continue; /* it is dead: the next one */
        }
        setsid();
        prctl(PR_SET_PDEATHSIG, SIGUSR1);
        if (first)
            mark();
        while (getppid() == self)
            nap(SIGUSR1);
        first = 0; /* orphaned: from here on this one is the elder */
    }
}

static void stay(void)
{
    for (;;)
        nap(SIGUSR1);
}

static void *child_of_a_thread(void *unused)
{
    (void)unused;
    if (fork_or_expire() == 0)
        mark();
    stay();
    return NULL;
}

static void headless(void)
{
    pthread_t thread;
    setsid();
    if (pthread_create(&thread, NULL, child_of_a_thread, NULL))
        _exit(1);
    mark();
    pthread_exit(NULL);
}

static void as_root(void)
{
    if (setresgid(0, 0, 0) || setresuid(0, 0, 0))
        _exit(1);
    mark();
    stay();
}

int main(int argc, char **argv)
{
    if (argc < 4 || (strcmp(argv[1], "chain") == 0) != (argc == 5))
        return 2;
    int count = atoi(argv[2]), seconds = atoi(argv[3]);
    if (count < 1 || count > 64 || seconds < 1 || seconds > 20)
        return 2;
    deadline = now() + seconds;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    int chain = strcmp(argv[1], "chain") == 0;
    int own_session = chain && strcmp(argv[4], "setsid") == 0;
    for (int i = 0; i < count; i++) {
        if (fork_or_expire() > 0)
            continue;
        if (strcmp(argv[1], "hydra") == 0)
            head();
        if (strcmp(argv[1], "headless") == 0)
            headless();
        if (strcmp(argv[1], "root") == 0)
            as_root();
        if (!chain)
            return 2;
        if (own_session)
            setsid();
        walk(own_session);
    }
    return 0;
}
