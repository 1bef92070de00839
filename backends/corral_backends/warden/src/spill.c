/* Spill files: the full stream on disk, bounded, private, and withdrawn at the first error. */
#include "warden.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysinfo.h>
#include <unistd.h>

enum { TMPFS = 0x01021994, BLOCK = 4096, MAX_DEPTH = 1000 };

/* Picks the name, which nobody can guess, but makes nothing: small output must leave no trace. */
void spill_choose_directory(const char *parent, size_t length)
{
    unsigned char noise[12];
    const char *base = length ? parent : getenv("TMPDIR");
    if (!length) {
        if (!base || base[0] != '/')
            base = "/tmp";
        length = strlen(base);
    }
    while (length > 1 && base[length - 1] == '/')
        length--;
    if (getrandom(noise, sizeof noise, 0) != (ssize_t)sizeof noise)
        _exit(70);
    char *path = xmalloc(length + sizeof "/corral-" + 2 * sizeof noise);
    memcpy(path, base, length);
    char *at = path + length + sprintf(path + length, "/corral-");
    for (size_t i = 0; i < sizeof noise; i++)
        at += sprintf(at, "%02x", noise[i]);
    settings.spill_dir = path;
}

char *spill_path(uint32_t task, int stream)
{
    size_t size = strlen(settings.spill_dir) + 32;
    char *path = xmalloc(size);
    snprintf(path, size, "%s/%u.%s", settings.spill_dir, task, stream ? "stderr" : "stdout");
    return path;
}

/* The directory, ours and closed to others, or -1. Several keepers may make it at the same moment. */
static int open_directory(void)
{
    struct stat info;
    if (mkdir(settings.spill_dir, 0700) && errno != EEXIST)
        return -1;
    int dir = open(settings.spill_dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (dir >= 0 && (fstat(dir, &info) || info.st_uid != geteuid() || (info.st_mode & 077))) {
        close(dir);
        return -1;
    }
    return dir;
}

static uint64_t number_in(const char *path)
{
    char text[32];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = '\0';
    return strtoull(text, NULL, 10);      /* "max" is 0 */
}

/* What this place may use of memory: the limit of its cgroup where it can be seen, else what the machine has. */
static uint64_t memory_limit(void)
{
    static const char *const files[] = {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    struct sysinfo info;
    uint64_t limit = sysinfo(&info) ? UINT64_MAX : (uint64_t)info.totalram * info.mem_unit;
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        uint64_t value = number_in(files[i]);
        if (value && value < limit)
            limit = value;
    }
    return limit;
}

bool spill_open(struct spill *spill, uint32_t task, int stream)
{
    char name[32];
    struct statfs fs;
    memset(spill, 0, sizeof *spill);
    spill->fd = -1;
    spill->cap = settings.spill_cap;
    int dir = spill->cap ? open_directory() : -1;
    if (dir < 0)
        return false;
    snprintf(name, sizeof name, "%u.%s", task, stream ? "stderr" : "stdout");
    spill->fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    close(dir);
    if (spill->fd < 0)
        return false;
    fchmod(spill->fd, 0600);              /* whatever the umask */
    spill->path = spill_path(task, stream);
    if (fstatfs(spill->fd, &fs) == 0 && fs.f_type == TMPFS) {
        uint64_t quarter = memory_limit() / 4, half = (uint64_t)fs.f_bavail * (uint64_t)fs.f_bsize / 2;
        if (spill->cap > quarter)
            spill->cap = quarter;
        if (fs.f_blocks && spill->cap > half)     /* a tmpfs of size 0 has no limit of its own */
            spill->cap = half;
    }
    return true;
}

/* Frees the head so that `incoming` more bytes stay within the cap. Offsets must not move, hence a hole; where the file
 * system knows no holes in the middle, an empty file that begins with one. Freed in steps, to call the kernel rarely. */
static bool make_room(struct spill *spill, size_t incoming)
{
    uint64_t end = spill->size + incoming;
    if (end - spill->start <= spill->cap)
        return true;
    uint64_t step = spill->cap / 8, start = end - spill->cap + step;
    start = (start + BLOCK - 1) / BLOCK * BLOCK;
    if (start > spill->size)
        start = spill->size;
    if (fallocate(spill->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)start) == 0) {
        spill->start = start;
        return true;
    }
    if (errno != EOPNOTSUPP && errno != ENOSYS)
        return false;
    spill->start = spill->size;
    return ftruncate(spill->fd, 0) == 0 && ftruncate(spill->fd, (off_t)spill->size) == 0;
}

/* Appends. After a failure the file is gone: one with a silent gap would be worse than none. */
bool spill_write(struct spill *spill, const void *data, size_t size)
{
    const char *p = data;
    size_t piece = spill->cap / 4 > BLOCK ? (size_t)(spill->cap / 4) : BLOCK;
    while (size) {
        size_t n = size < piece ? size : piece;
        if (!make_room(spill, n) || !write_all(spill->fd, p, n)) {
            spill_close(spill);
            return false;
        }
        spill->size += n;
        p += n;
        size -= n;
    }
    return true;
}

/* Some file systems report a failed write only here (NFS, quotas, FUSE), so the path is given out only after this. */
bool spill_close(struct spill *spill)
{
    bool whole = spill->fd >= 0 && close(spill->fd) == 0;
    spill->fd = -1;
    return whole;
}

static void remove_tree(int parent, const char *name, int depth)
{
    if (unlinkat(parent, name, 0) == 0 || (errno != EISDIR && errno != EPERM))
        return;
    /* A command may have closed its directories even to us; but they are ours, so they can be opened again. */
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == EACCES && fchmodat(parent, name, 0700, 0) == 0)
        fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd >= 0 && depth < MAX_DEPTH ? fdopendir(fd) : NULL;
    if (dir) {
        fchmod(fd, 0700);
        struct dirent *entry;
        while ((entry = readdir(dir)))
            if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
                remove_tree(fd, entry->d_name, depth + 1);
        closedir(dir);
    } else if (fd >= 0) {
        close(fd);
    }
    unlinkat(parent, name, AT_REMOVEDIR);
}

/* The directory and all in it, also what commands have put there. */
void spill_remove_all(void)
{
    if (settings.spill_dir)
        remove_tree(AT_FDCWD, settings.spill_dir, 0);
}
