/* Loaded into qemu-user by LD_PRELOAD. qemu answers prctl(PR_SET_CHILD_SUBREAPER) with EINVAL in place of passing it on,
 * so whatever a command leaves behind would become a child of init, out of the warden's sight. This makes the call for
 * the two that want it: the program itself and each keeper, but not the commands, which take a session of their own
 * before they start. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/prctl.h>
#include <unistd.h>

static int forked;

__attribute__((constructor)) static void begin(void)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
}

/* What qemu makes of fork and vfork. */
pid_t fork(void)
{
    pid_t (*next)(void) = (pid_t (*)(void))dlsym(RTLD_NEXT, "fork");
    pid_t pid = next();
    if (pid == 0) {
        forked = 1;
        prctl(PR_SET_CHILD_SUBREAPER, 1);
    }
    return pid;
}

pid_t setsid(void)
{
    pid_t (*next)(void) = (pid_t (*)(void))dlsym(RTLD_NEXT, "setsid");
    if (forked)
        prctl(PR_SET_CHILD_SUBREAPER, 0);
    return next();
}
