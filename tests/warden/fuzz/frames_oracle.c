/* What the host would hear, checked against PROTOCOL.md: the form of each frame, and the order of each task's. */
#include "warden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                                            \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "the host would not take this: %s\n", #condition);                                        \
            abort();                                                                                                  \
        }                                                                                                             \
    } while (0)

enum { KNOWN = 1024 };
enum state { UNKNOWN, RUNNING, FETCHED, EXITED, ENDED };

static struct heard {
    uint32_t id;
    enum state state;
    uint64_t at[2], run[2];       /* offset reached, and bytes without a gap before it */
} tasks[KNOWN];
static int known;
static bool ready, bye;
static uint8_t *buffer;
static size_t used, room;

void check_reset(void)
{
    known = 0;
    ready = bye = false;
    used = 0;
}

static struct heard *find(uint32_t id)
{
    for (int i = 0; i < known; i++)
        if (tasks[i].id == id)
            return &tasks[i];
    REQUIRE(known < KNOWN);
    tasks[known] = (struct heard){.id = id};
    return &tasks[known++];
}

static void forget(struct heard *task)
{
    *task = tasks[--known];       /* the fuzzer may use a number again, which a host must not */
}

static void check_data(struct heard *task, uint8_t flags, struct reader *r)
{
    uint64_t offset = get_u64(r);
    REQUIRE(flags == 1 || flags == 2);
    REQUIRE(!r->bad && r->left && r->left <= MAX_DATA);
    int stream = flags - 1;
    if (task->state == UNKNOWN) {
        task->state = FETCHED;
        task->at[0] = offset;
    }
    REQUIRE(task->state == RUNNING || task->state == EXITED || (task->state == FETCHED && offset == task->at[0]));
    REQUIRE(offset >= task->at[stream] && offset + r->left > offset);
    if (offset > task->at[stream])
        task->run[stream] = 0;
    task->run[stream] += r->left;
    task->at[stream] = offset + r->left;
    r->left = 0;
}

static void check_end(struct heard *task, struct reader *r)
{
    bool fetch = task->state == UNKNOWN || task->state == FETCHED;
    REQUIRE(fetch || task->state == EXITED);
    for (int i = 0; i < 2; i++) {
        size_t length;
        uint64_t total = get_u64(r), start = get_u64(r);
        uint32_t state = get_u32(r);
        const char *path = get_text(r, &length);
        REQUIRE(!r->bad && state <= SPILL_FAILED && start <= total);
        REQUIRE((state == SPILL_COMPLETE) == (length != 0) && (!length || path[0] == '/'));
        REQUIRE(task->state == UNKNOWN || total == task->at[i]);
        REQUIRE(fetch || task->run[i] >= (total < settings.keep ? total : settings.keep));
    }
    task->state = ENDED;
}

static void check_frame(const uint8_t *frame, size_t size)
{
    uint8_t type = frame[4], flags = frame[5];
    struct reader r = {.at = frame + 8, .left = 4};
    uint32_t id = get_u32(&r);
    size_t length;
    r = (struct reader){.at = frame + HEADER_SIZE, .left = size};
    REQUIRE(!bye && !frame[6] && !frame[7]);
    if (type == F_ERROR) {
        uint16_t code = get_u16(&r);
        REQUIRE(code >= E_WORKDIR && code <= E_FILE && (code == E_PROTOCOL) == (id == 0));
        REQUIRE(get_u16(&r) == 0 && get_u32(&r) < 4096);
        get_text(&r, &length);
        if (id) {
            struct heard *task = find(id);
            REQUIRE(task->state == UNKNOWN || task->state == FETCHED);
            forget(task);
        }
    } else if (type == F_READY || type == F_PONG || type == F_BYE) {
        REQUIRE(id == 0 && (type == F_READY ? !ready : ready || type == F_BYE));
        ready = true;
        bye = type == F_BYE;
        r.left = type == F_READY ? 0 : r.left - (type == F_PONG ? 8 : 0);
    } else {
        REQUIRE(ready && id);
        struct heard *task = find(id);
        REQUIRE(type == F_STARTED || type == F_DATA || type == F_SPILL || type == F_EXIT || type == F_END || type == F_GONE);
        if (type == F_STARTED) {
            REQUIRE(task->state == UNKNOWN);
            task->state = RUNNING;
            get_u32(&r);
        } else if (type == F_DATA) {
            check_data(task, flags, &r);
        } else if (type == F_SPILL) {
            REQUIRE((task->state == RUNNING || task->state == EXITED) && (flags == 1 || flags == 2));
            get_u64(&r);
            get_text(&r, &length);
        } else if (type == F_EXIT) {
            uint8_t kind = get_u8(&r);
            REQUIRE(kind >= EXIT_EXITED && kind <= EXIT_LOST && r.left == 39);
            REQUIRE(task->state == RUNNING || (task->state == UNKNOWN && kind == EXIT_LOST));
            task->state = EXITED;
            r.left = 0;
        } else if (type == F_END) {
            check_end(task, &r);
        } else {
            REQUIRE(task->state == ENDED);
            get_u32(&r);
            forget(task);
        }
    }
    REQUIRE(!r.bad && !r.left);
}

void check_output(const uint8_t *bytes, size_t size)
{
    if (room - used < size) {
        room = (used + size) * 2;
        buffer = realloc(buffer, room);
        if (!buffer)
            abort();
    }
    memcpy(buffer + used, bytes, size);
    used += size;
    size_t at = 0;
    while (used - at >= HEADER_SIZE) {
        struct reader r = {.at = buffer + at, .left = 4};
        size_t length = get_u32(&r);
        REQUIRE(length <= 1 << 20);
        if (used - at < HEADER_SIZE + length)
            break;
        check_frame(buffer + at, length);
        at += HEADER_SIZE + length;
    }
    memmove(buffer, buffer + at, used - at);
    used -= at;
}
