/* Starting bash: the one place where a process of ours becomes one of the command's. */
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* bash gets a command that is too long for an argument on descriptor 9, which is closed before the first word of it
 * runs. Unlike a script file this keeps $0, `return` outside functions, heredocs and the last line as with -c. */
#define LONG_COMMAND "mapfile -d '' -u 9 REPLY; exec 9<&-; eval \"unset REPLY;${REPLY[0]}\""

enum { LONG_FD = 9 };

/* In memory that the child of vfork() shares with us until it execs. */
static volatile struct failure met;

static _Noreturn void fail(int code, int error)
{
    met.code = code;
    met.error = error;
    _exit(127);
}

static _Noreturn void become(const char *path, char *const argv[], char *const envp[], const int std[3], int long_fd,
                             const char *workdir)
{
    setsid();
    for (int fd = 0; fd < 3; fd++)
        if (std[fd] == fd ? fcntl(fd, F_SETFD, 0) < 0 : dup2(std[fd], fd) < 0)
            fail(E_SPAWN, errno);
    if (long_fd == LONG_FD)
        fcntl(LONG_FD, F_SETFD, 0);
    else if (long_fd >= 0 && dup2(long_fd, LONG_FD) < 0)
        fail(E_SPAWN, errno);
    if (workdir[0] && chdir(workdir))
        fail(E_WORKDIR, errno);
    setrlimit(RLIMIT_NOFILE, &settings.nofile);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execve(path, argv, envp);
    fail(errno == E2BIG ? E_TOO_LARGE : errno == EAGAIN || errno == ENOMEM ? E_SPAWN : E_SHELL, errno);
}

/* The leader's pid, in a session of its own, with `std` as its descriptors 0 to 2 and no others; or -1 and why. */
pid_t spawn_bash(const struct task *task, const int std[3], struct failure *failure)
{
    char *shell = settings.shell ? settings.shell : find_shell(settings.shell_option);
    if (!shell) {
        *failure = (struct failure){E_SHELL, ENOENT};
        return -1;
    }
    bool is_long = task->command_fd >= 0;
    if (is_long)
        lseek(task->command_fd, 0, SEEK_SET);
    if (task->stdin_fd >= 0)
        lseek(task->stdin_fd, 0, SEEK_SET);
    /* --norc: under sshd, Debian's bash reads ~/.bashrc even for -c. `--`: a command may begin with a dash. */
    char *argv[] = {"bash", "--norc", "-c", "--", is_long ? LONG_COMMAND : task->command, NULL};
    char **envp = settings.environment;
    if (task->env_size)
        envp = merged_environment(envp, task->env, task->env_size);
    pid_t pid = vfork();
    if (pid == 0)
        become(shell, argv, envp, std, task->command_fd, task->workdir);
    if (pid < 0) {
        *failure = (struct failure){E_SPAWN, errno};
        return -1;
    }
    if (met.code) {
        waitpid(pid, NULL, 0);
        *failure = (struct failure){met.code, met.error};
        return -1;
    }
    return pid;
}
