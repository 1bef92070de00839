/* What the host hears of commands: DATA, EXIT, END, GONE in the order that the protocol promises. */
#include "warden.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

bool output_blocked;                          /* some task waits for room in the queue */

struct finished_spill {
    struct finished_spill *next;
    uint32_t task;
    int stream;
    uint64_t size;
};
static struct finished_spill *spills_first, **spills_end = &spills_first;
static uint64_t spills_size;

/* Before the first DATA after a spill file was made, withdrawn, or lost some of its head, the host is told so. */
static void send_spill(struct task *task, int stream)
{
    struct shared_stream *s = &task->shared->stream[stream];
    struct out_stream *o = &task->out[stream];
    uint32_t state = atomic_load(&s->spill_state);
    uint64_t start = atomic_load(&s->spill_start);
    if (state == o->told_state && start == o->told_start)
        return;
    o->told_state = state;
    o->told_start = start;
    char *path = state == SPILL_OPEN || state == SPILL_COMPLETE ? spill_path(task->id, stream) : strdup("");
    uint8_t *p = begin_frame(F_SPILL, (uint8_t)(stream + 1), task->id, 12 + strlen(path));
    put_text(put_u64(p, start), path, strlen(path));
    free(path);
}

/* Copies out of a ring that may be written meanwhile; see struct shared_stream. */
static bool send_stream(struct task *task, int stream, uint64_t *credit)
{
    static uint8_t copy[MAX_DATA];
    struct shared_stream *s = &task->shared->stream[stream];
    struct out_stream *o = &task->out[stream];
    const uint8_t *ring = shared_ring(task->shared, stream);
    uint64_t head, mask = settings.ring - 1;
    while ((head = atomic_load(&s->head)) > o->sent) {
        uint64_t kept = credit ? settings.ring : settings.keep;
        if (head > kept && o->sent < head - kept)
            o->sent = head - kept;
        uint64_t n = head - o->sent;
        if (n > MAX_DATA)
            n = MAX_DATA;
        if (credit && n > *credit)
            n = *credit;
        if (!n)
            return true;
        if (queued() >= OUT_HIGH) {
            output_blocked = true;
            return false;
        }
        size_t at = o->sent & mask, first = settings.ring - at < n ? settings.ring - at : (size_t)n;
        memcpy(copy, ring + at, first);
        memcpy(copy + first, ring, (size_t)n - first);
        atomic_thread_fence(memory_order_seq_cst);
        uint64_t reserve = atomic_load(&s->reserve), from = o->sent;
        if (reserve > settings.ring && reserve - settings.ring > from)
            from = reserve - settings.ring;   /* overwritten while it was copied */
        uint64_t end = o->sent + n;
        if (from < end) {
            size_t size = (size_t)(end - from);
            if (credit)
                send_spill(task, stream);
            memcpy(put_u64(begin_frame(F_DATA, (uint8_t)(stream + 1), task->id, 8 + size), from),
                   copy + (from - o->sent), size);
            if (credit)
                *credit -= size;
        }
        o->sent = from < end ? end : from;
    }
    return true;
}

static void send_exit(const struct task *task)
{
    uint8_t *p = begin_frame(F_EXIT, 0, task->id, 40);
    p = put_u32(p, task->exit.a);
    p = put_u32(p, (uint32_t)task->exit.b);
    p = put_u64(p, task->exit.user_us);
    p = put_u64(p, task->exit.system_us);
    p = put_u64(p, task->exit.wall_us);
    put_u64(p, task->exit.max_rss);
}

static void drop_oldest_spill(void)
{
    struct finished_spill *oldest = spills_first;
    char *path = spill_path(oldest->task, oldest->stream);
    unlink(path);
    free(path);
    spills_size -= oldest->size;
    spills_first = oldest->next;
    if (!spills_first)
        spills_end = &spills_first;
    free(oldest);
}

static void remember_spill(uint32_t task, int stream, uint64_t size)
{
    struct finished_spill *spill = xmalloc(sizeof *spill);
    *spill = (struct finished_spill){.task = task, .stream = stream, .size = size};
    *spills_end = spill;
    spills_end = &spill->next;
    spills_size += size;
    while (spills_size > settings.spill_total && spills_first != spill)
        drop_oldest_spill();
}

void task_forget(uint32_t id)
{
    for (struct finished_spill **link = &spills_first; *link;) {
        struct finished_spill *spill = *link;
        if (spill->task != id) {
            link = &spill->next;
            continue;
        }
        char *path = spill_path(id, spill->stream);
        unlink(path);
        free(path);
        spills_size -= spill->size;
        *link = spill->next;
        if (spills_end == &spill->next)
            spills_end = link;
        free(spill);
    }
}

static void send_end(struct task *task)
{
    uint64_t total[2] = {task->out[0].sent, task->out[1].sent}, start[2] = {0, 0};
    uint32_t state[2] = {SPILL_NONE, SPILL_NONE};
    char *path[2] = {NULL, NULL};
    size_t size = 0;
    for (int i = 0; i < 2; i++) {
        if (task->shared) {
            struct shared_stream *s = &task->shared->stream[i];
            total[i] = atomic_load(&s->head);
            state[i] = atomic_load(&s->spill_state);
            if (state[i] == SPILL_OPEN)       /* its keeper died before it could be closed */
                state[i] = SPILL_FAILED;
            start[i] = state[i] == SPILL_COMPLETE ? atomic_load(&s->spill_start) : 0;
        }
        if (state[i] != SPILL_NONE)
            path[i] = spill_path(task->id, i);
        if (state[i] == SPILL_COMPLETE)
            remember_spill(task->id, i, total[i] - start[i]);
        else if (task->keeper_lost && path[i])
            unlink(path[i]);
        size += 24 + (state[i] == SPILL_COMPLETE ? strlen(path[i]) : 0);
    }
    uint8_t *p = begin_frame(F_END, task->leftovers, task->id, size);
    for (int i = 0; i < 2; i++) {
        p = put_u64(p, total[i]);
        p = put_u64(p, start[i]);
        p = put_u32(p, state[i]);
        p = put_text(p, path[i] ? path[i] : "", state[i] == SPILL_COMPLETE ? strlen(path[i]) : 0);
        free(path[i]);
    }
}

/* Sends what can be sent of this task, in the order that the protocol promises, and frees it after its last frame. */
void task_emit(struct task *task)
{
    if (host_gone) {
        if (task->gone && !task->keeper && task->ctl < 0)
            task_free(task);
        return;
    }
    if (task->exited && !task->exit_sent) {
        send_exit(task);
        task->exit_sent = true;
    }
    /* Output can be in the ring before the keeper's word that it has started the command was read. */
    if (task->shared && task->started && !task->ended) {
        for (;;) {
            bool room = true, hungry = false;
            for (int i = 0; i < 2; i++) {
                room = send_stream(task, i, &task->out[i].credit) && room;
                hungry = hungry || task->out[i].credit;
            }
            if (!room || !hungry)
                break;
            atomic_store(&task->shared->armed, 1);
            bool more = false;
            for (int i = 0; i < 2; i++)
                more = more || (task->out[i].credit && atomic_load(&task->shared->stream[i].head) > task->out[i].sent);
            if (!more)
                break;
        }
    }
    if (task->ended && !task->end_sent) {
        if (task->shared && (!send_stream(task, 0, NULL) || !send_stream(task, 1, NULL)))
            return;                       /* tasks_resume() comes back to it */
        send_end(task);
        task->end_sent = true;
    }
    if (task->gone && task->end_sent && !task->gone_sent) {
        put_u32(begin_frame(F_GONE, task->keeper_lost, task->id, 4), task->survivors);
        task->gone_sent = true;
    }
    if (task->gone_sent && !task->keeper && task->ctl < 0)
        task_free(task);
}

/* The queue has room again: goes on with every task that had to wait for it. */
void tasks_resume(void)
{
    struct task *next;
    for (struct task *task = tasks_first; task; task = next) {
        next = task->next;
        if (task->state != T_ASSEMBLING)
            task_credit(task, 0, 0);
    }
}

void task_credit(struct task *task, int stream, uint64_t bytes)
{
    struct out_stream *o = &task->out[stream];
    o->credit = o->credit + bytes < MAX_CREDIT ? o->credit + bytes : MAX_CREDIT;
    if (task->state == T_FETCHING && task->ctl >= 0) {
        if (task->paused) {
            task->paused = false;
            watch(task->ctl, EPOLLIN, task);
        }
        task_readable(task);
    } else {
        task_emit(task);
    }
}
