/* The environment of commands, and where bash is. */
#include "warden.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

/* What would make bash run code, take options or import functions before the command. OLDPWD is state of another
 * shell: `cd -` must not know it. */
static bool refused(const char *entry)
{
    static const char *const names[] = {"BASH_ENV=", "ENV=", "SHELLOPTS=", "BASHOPTS=", "BASH_FUNC_", "OLDPWD="};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strncmp(entry, names[i], strlen(names[i])) == 0)
            return true;
    return !strchr(entry, '=') || entry[0] == '=';
}

static size_t name_length(const char *entry)
{
    return strcspn(entry, "=") + 1;
}

/* Where `entry` is, or will be, in a table of a power of two of slots that is never full. */
static char ***slot_of(char ***table, size_t slots, const char *entry)
{
    size_t length = name_length(entry), at = 5381;
    for (size_t i = 0; i < length; i++)
        at = at * 33 + (unsigned char)entry[i];
    while (table[at &= slots - 1] && strncmp(*table[at], entry, length) != 0)
        at++;
    return &table[at];
}

/* `base` with the entries of `block` on top, each name once; the strings stay where they are. By way of a table, because
 * of the hundred thousand entries that a kernel may take, each had to be compared with all that came before it. */
char **merged_environment(char **base, const char *block, size_t size)
{
    size_t count = 0, n = 0, slots = 64;
    while (base[count])
        count++;
    for (size_t at = 0; at < size; at += strlen(block + at) + 1)
        count++;
    while (slots < 2 * count)
        slots *= 2;
    char **result = xmalloc((count + 1) * sizeof *result), ***table = xmalloc(slots * sizeof *table);
    memset(table, 0, slots * sizeof *table);
    for (size_t at = 0; *base || at < size;) {
        char *entry = *base ? *base++ : (char *)block + at;
        if (entry == block + at)
            at += strlen(entry) + 1;
        char ***slot = slot_of(table, slots, entry);
        if (!*slot)
            *slot = &result[n++];
        **slot = entry;
    }
    free(table);
    result[n] = NULL;
    return result;
}

/* What the warden itself inherited, less what is refused, with `block` on top. Lives as long as the session. */
char **base_environment(const char *block, size_t size)
{
    size_t count = 0, n = 0;
    while (environ[count])
        count++;
    char **kept = xmalloc((count + 1) * sizeof *kept);
    for (size_t i = 0; i < count; i++)
        if (!refused(environ[i]))
            kept[n++] = environ[i];
    kept[n] = NULL;
    char *copy = xmalloc(size + 1);
    memcpy(copy, block, size);
    char **result = merged_environment(kept, copy, size);
    free(kept);
    return result;
}

static bool runnable(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) && access(path, X_OK) == 0;
}

/* The absolute path of bash in this place, or NULL. An option that is a path is not searched for elsewhere. */
char *find_shell(const char *option)
{
    const char *name = option ? option : "bash";
    if (strchr(name, '/'))
        return runnable(name) ? strdup(name) : NULL;
    const char *path = getenv("PATH");
    static const char fallback[] = "/usr/local/bin:/usr/bin:/bin";
    const char *const lists[] = {path ? path : "", fallback};
    for (int i = 0; i < 2; i++) {
        for (const char *at = lists[i]; *at;) {
            size_t length = strcspn(at, ":");
            if (length && at[0] == '/') {     /* a relative entry would depend on where we stand */
                size_t size = length + strlen(name) + 2;
                char *candidate = xmalloc(size);
                memcpy(candidate, at, length);
                candidate[length] = '/';
                strcpy(candidate + length + 1, name);
                if (runnable(candidate))
                    return candidate;
                free(candidate);
            }
            at += length + (at[length] == ':');
        }
    }
    return NULL;
}
