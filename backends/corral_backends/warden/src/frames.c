/* Reading payloads with bounds checks, and the queue of outgoing frames. */
#include "warden.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint8_t *take(struct reader *r, size_t size)
{
    static const uint8_t zeros[8];
    if (r->bad || r->left < size) {
        r->bad = true;
        return size <= sizeof zeros ? zeros : NULL;
    }
    const uint8_t *p = r->at;
    r->at += size;
    r->left -= size;
    return p;
}

uint8_t get_u8(struct reader *r)
{
    return take(r, 1)[0];
}

uint16_t get_u16(struct reader *r)
{
    const uint8_t *p = take(r, 2);
    return (uint16_t)(p[0] | p[1] << 8);
}

uint32_t get_u32(struct reader *r)
{
    const uint8_t *p = take(r, 4);
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint64_t get_u64(struct reader *r)
{
    uint64_t low = get_u32(r);
    return low | (uint64_t)get_u32(r) << 32;
}

/* A text that must not contain NUL, because it becomes a C string. Not terminated. */
const char *get_text(struct reader *r, size_t *length)
{
    *length = get_u32(r);
    if (r->bad || *length > r->left) {
        r->bad = true;
        *length = 0;
        return "";
    }
    const char *text = (const char *)r->at;
    r->at += *length;
    r->left -= *length;
    return text;
}

/* `K=V\0` any number of times: every entry terminated, with a name that is not empty. */
bool environment_block_ok(const char *block, size_t size)
{
    for (size_t at = 0; at < size;) {
        const char *end = memchr(block + at, '\0', size - at);
        if (!end)
            return false;
        const char *equals = memchr(block + at, '=', (size_t)(end - (block + at)));
        if (!equals || equals == block + at)
            return false;
        at = (size_t)(end - block) + 1;
    }
    return true;
}

struct queue outgoing;
uint64_t held_until;              /* monotonic ms; 0: send at once. Any further frame ends it */

size_t queued(void)
{
    return outgoing.end - outgoing.start;
}

/* Room for a frame at the end of the queue, its header written; returns where the payload goes. */
uint8_t *begin_frame(uint8_t type, uint8_t flags, uint32_t task, size_t payload)
{
    size_t need = HEADER_SIZE + payload;
    if (outgoing.size - outgoing.end < need) {
        size_t used = queued();
        if (outgoing.size - used < need) {
            size_t size = outgoing.size ? outgoing.size : 64 << 10;
            while (size - used < need)
                size *= 2;
            uint8_t *data = xmalloc(size);
            if (used)
                memcpy(data, outgoing.data + outgoing.start, used);
            free(outgoing.data);
            outgoing.data = data;
            outgoing.size = size;
        } else {
            memmove(outgoing.data, outgoing.data + outgoing.start, used);
        }
        outgoing.start = 0;
        outgoing.end = used;
    }
    held_until = 0;
    uint8_t *p = outgoing.data + outgoing.end;
    outgoing.end += need;
    p = put_u32(p, (uint32_t)payload);
    *p++ = type;
    *p++ = flags;
    p = put_u16(p, 0);
    return put_u32(p, task);
}

uint8_t *put_u16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    return p + 2;
}

uint8_t *put_u32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> 8 * i);
    return p + 4;
}

uint8_t *put_u64(uint8_t *p, uint64_t v)
{
    p = put_u32(p, (uint32_t)v);
    return put_u32(p, (uint32_t)(v >> 32));
}

uint8_t *put_text(uint8_t *p, const char *text, size_t length)
{
    p = put_u32(p, (uint32_t)length);
    memcpy(p, text, length);
    return p + length;
}

/* Writes what the stream takes now. Returns 1 when all is out, 0 when it would block, -1 when the host is gone. */
int flush_queue(int fd)
{
    while (queued()) {
        ssize_t n = write(fd, outgoing.data + outgoing.start, queued());
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n <= 0)
            return -1;
        outgoing.start += (size_t)n;
    }
    outgoing.start = outgoing.end = 0;
    if (outgoing.size > 4 * OUT_HIGH) {   /* one burst must not cost memory for ever */
        free(outgoing.data);
        outgoing.data = NULL;
        outgoing.size = 0;
    }
    return 1;
}
