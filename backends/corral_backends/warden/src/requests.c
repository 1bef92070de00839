/* The frames that the host sends, checked and obeyed. */
#include "warden.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

static bool greeted;

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
        begin_shutdown(value);
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

/* One whole frame. False when it is malformed or not allowed now. */
bool on_frame(const uint8_t *frame, size_t payload)
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
