/* corral-warden: runs bash commands for one host and lets nothing of them outlive it. See PROTOCOL.md. */
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

struct settings settings;

/* Keeps descriptor numbers 0 to 2 out of reach: commands get their own there, and nothing of ours may be mistaken
 * for them. Returns a close-on-exec copy of `fd` above them. */
static int moved_up(int fd)
{
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (copy < 0) {
        perror("corral-warden: stream");
        exit(2);
    }
    return copy;
}

static int number(const char *text)
{
    char *end;
    long value = strtol(text, &end, 10);
    if (*text == '\0' || *end != '\0' || value < 0 || value > 1 << 20) {
        fprintf(stderr, "corral-warden: '%s' is not a descriptor number\n", text);
        exit(2);
    }
    return (int)value;
}

int main(int argc, char **argv)
{
    int host_pidfd = -1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--version") == 0) {
            printf("corral-warden protocol %d\n", PROTOCOL_VERSION);
            return 0;
        } else if (strcmp(argv[i], "--host-pidfd") == 0 && i + 1 < argc) {
            host_pidfd = number(argv[++i]);
        } else {
            fprintf(stderr, "usage: corral-warden [--version] [--host-pidfd N]  (frames on descriptors 0 and 1)\n");
            return 2;
        }
    }
    reset_signals();
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);             /* an inherited limit on file sizes must fail a spill, not end a keeper */
    setsid();                             /* fails only when we lead a session already */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_DUMPABLE, 0);

    /* Commands get the limit that was inherited; the warden itself may need a descriptor per command. */
    if (getrlimit(RLIMIT_NOFILE, &settings.nofile) == 0) {
        struct rlimit raised = settings.nofile;
        raised.rlim_cur = raised.rlim_max;
        setrlimit(RLIMIT_NOFILE, &raised);
    }
    char *here = getcwd(NULL, 0);
    settings.start_dir = here ? here : strdup("");

    int in = moved_up(STDIN_FILENO), out = moved_up(STDOUT_FILENO);
    int null = open("/dev/null", O_RDWR);
    if (null < 0) {
        perror("corral-warden: /dev/null");
        return 2;
    }
    for (int fd = 0; fd < 3; fd++)
        if (null != fd)
            dup2(null, fd);
    if (null > 2)
        close(null);
    if (host_pidfd >= 0)
        fcntl(host_pidfd, F_SETFD, FD_CLOEXEC);
    int keep[] = {in, out, host_pidfd};
    close_all_except(keep, 3);
    fcntl(in, F_SETFL, fcntl(in, F_GETFL) | O_NONBLOCK);
    fcntl(out, F_SETFL, fcntl(out, F_GETFL) | O_NONBLOCK);
    return dispatch(in, out, host_pidfd);
}
