/* Types and constants shared by the parts of the warden. The wire format is described in PROTOCOL.md. */
#ifndef CORRAL_WARDEN_H
#define CORRAL_WARDEN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#define PROTOCOL_VERSION 1

enum {
    HEADER_SIZE = 12,
    MAX_FRAME_IN = 8 << 20,
    MAX_DATA = 64 << 10,          /* payload bytes of one DATA frame, without its offset */
    MAX_RING = 16 << 20,
    MAX_CREDIT = 16 << 20,
    OUT_HIGH = 1 << 20,           /* DATA stops here; control frames may exceed it */
    OUT_STOP_READING = 8 << 20,   /* a host that does not read is not read from either */
    MAX_TASKS = 32768,
    INLINE_COMMAND = 131071,      /* MAX_ARG_STRLEN less the terminating NUL */
    PUMP_CHUNK = 256 << 10,
    HOLD_MS = 2,                  /* how long STARTED waits for company */
    DRAIN_MS = 50,                /* how long a leftover may delay END */
    STUCK_MS = 350,               /* SIGKILL without any death for this long: survivors */
    KEEPER_SILENCE_MS = 500,      /* past the grace; then the keeper itself is killed */
};

#define MAX_TEXT_BYTES ((uint64_t)1 << 30)

enum frame_type {
    F_HELLO = 0x01, F_START, F_TEXT, F_STDIN, F_KILL, F_CREDIT, F_PING, F_SHUTDOWN, F_FORGET, F_FETCH,
    F_READY = 0x81, F_STARTED, F_DATA, F_EXIT, F_END, F_GONE, F_ERROR, F_PONG, F_BYE, F_SPILL,
};

enum error_code { E_WORKDIR = 1, E_SHELL, E_SPAWN, E_TOO_LARGE, E_PROTOCOL, E_REFUSED, E_FILE };
enum exit_kind { EXIT_EXITED = 1, EXIT_SIGNALLED, EXIT_LOST };
enum spill_state { SPILL_NONE, SPILL_COMPLETE, SPILL_FAILED, SPILL_OPEN };

/* Written by the keeper, read by the dispatcher, in memory that both map. The keeper publishes `reserve` before it
 * overwrites ring bytes and `head` after it wrote them; whoever copied out of the ring checks `reserve` afterwards
 * and drops what may have been overwritten meanwhile. */
struct shared_stream {
    _Atomic uint64_t head;
    _Atomic uint64_t reserve;
    _Atomic uint64_t spill_start;
    _Atomic uint32_t spill_state;
};

struct shared {
    struct shared_stream stream[2];
    _Atomic uint32_t armed;       /* the dispatcher wants to hear of new output */
};

/* Settings of the session, fixed by HELLO. */
struct settings {
    uint32_t lease_ms;
    uint32_t keep;                /* bytes of the tail that END guarantees */
    uint32_t ring;                /* power of two, at least `keep` */
    uint64_t spill_cap;
    uint64_t spill_total;
    char *spill_dir;              /* our own directory, made when first needed */
    char *shell;                  /* absolute path, or NULL when it must be searched */
    char *shell_option;           /* as the host gave it, or NULL */
    char **environment;           /* base of every command, filtered */
    char *start_dir;
    struct rlimit nofile;         /* as inherited: what commands get back */
};
extern struct settings settings;

/* Messages on the socket between the dispatcher and a keeper. */
enum message_type { M_KILL = 1, M_STARTED, M_FAILED, M_NOTE, M_EXIT, M_END, M_GONE };
struct message {
    uint32_t type;
    uint32_t a;                   /* KILL: grace; STARTED: pid; FAILED: code; EXIT: kind; END: leftovers; GONE: survivors */
    int32_t b;                    /* FAILED: errno; EXIT: value */
    uint32_t pad;
    uint64_t user_us, system_us, wall_us, max_rss;
};

enum task_state { T_ASSEMBLING, T_RUNNING, T_FETCHING };

struct out_stream {
    uint64_t sent;                /* offset up to which DATA was sent, or skipped */
    uint64_t credit;
    uint64_t told_start;          /* what SPILL said last */
    uint32_t told_state;
};

struct task {
    struct task *next, *prev;     /* all tasks, in start order */
    struct task *chain;           /* hash chain */
    uint32_t id;
    enum task_state state;

    /* assembling */
    char *workdir;                /* one allocation: workdir, NUL, environment block */
    char *env;
    size_t env_size;
    char *command;                /* up to INLINE_COMMAND bytes, else command_fd */
    int command_fd, stdin_fd;
    uint64_t command_size, command_have, stdin_size, stdin_have;

    /* running */
    pid_t keeper;                 /* 0 once reaped */
    int ctl;                      /* socket to the keeper (FETCH: the pipe that it fills), -1 once closed */
    struct shared *shared;
    size_t shared_size;
    struct out_stream out[2];
    uint64_t kill_deadline;       /* monotonic ms; 0: no kill under way */
    bool started, exited, ended, gone;            /* told by the keeper */
    bool exit_sent, end_sent, gone_sent;          /* told to the host */
    bool leftovers, keeper_lost, hunted, paused;
    uint32_t survivors;
    struct message exit;
};

/* util.c */
uint64_t now_ms(void);
uint64_t now_us(void);
void *xmalloc(size_t size);
char *xstrndup(const char *text, size_t length);
bool write_all(int fd, const void *data, size_t size);
void close_all_except(const int *keep, int count);
void reset_signals(void);

/* frames.c: bounds-checked reading of a payload, and the outgoing queue. */
struct reader {
    const uint8_t *at;
    size_t left;
    bool bad;
};
uint8_t get_u8(struct reader *r);
uint16_t get_u16(struct reader *r);
uint32_t get_u32(struct reader *r);
uint64_t get_u64(struct reader *r);
const char *get_text(struct reader *r, size_t *length);
bool environment_block_ok(const char *block, size_t size);

struct queue {
    uint8_t *data;
    size_t start, end, size;
};
extern struct queue outgoing;
extern uint64_t held_until;
size_t queued(void);
uint8_t *begin_frame(uint8_t type, uint8_t flags, uint32_t task, size_t payload);
uint8_t *put_u16(uint8_t *p, uint16_t v);
uint8_t *put_u32(uint8_t *p, uint32_t v);
uint8_t *put_u64(uint8_t *p, uint64_t v);
uint8_t *put_text(uint8_t *p, const char *text, size_t length);
int flush_queue(int fd);

/* environ.c */
char **base_environment(const char *block, size_t size);
char **merged_environment(char **base, const char *block, size_t size);
char *find_shell(const char *option);

/* tree.c: everything that looks at or signals processes. */
int direct_children(pid_t **list);
void term_tree(pid_t leader, bool leader_alive);
uint32_t count_tree(void);

/* spill.c: used by keepers, and by the dispatcher to clean up. */
struct spill {
    int fd;
    uint64_t size, start, cap;
    char *path;
};
char *spill_path(uint32_t task, int stream);
bool spill_open(struct spill *spill, uint32_t task, int stream);
bool spill_write(struct spill *spill, const void *data, size_t size);
bool spill_close(struct spill *spill);
void spill_remove_all(void);
void spill_choose_directory(const char *parent, size_t length);

/* spawn.c */
struct failure {
    int code, error;
};
pid_t spawn_bash(const struct task *task, const int std[3], struct failure *failure);

/* keeper.c */
_Noreturn void keeper_main(struct task *task, int ctl);
uint8_t *shared_ring(struct shared *shared, int stream);

/* fetch.c */
_Noreturn void fetch_main(const char *path, uint64_t offset, int out);

/* tasks.c */
extern struct task *tasks_first, *tasks_last;
extern unsigned task_count;
struct task *task_find(uint32_t id);
struct task *task_new(uint32_t id);
void task_free(struct task *task);
void tasks_bury(void);
void task_start(struct task *task);
void task_fetch(struct task *task, const char *path, uint64_t offset);
void task_fail(struct task *task, enum error_code code, int error);
void task_kill(struct task *task, uint32_t grace_ms);
void task_readable(struct task *task);
bool children_died(void);
uint64_t tasks_tick(uint64_t now);

/* emit.c */
extern bool output_blocked;
void task_emit(struct task *task);
void task_credit(struct task *task, int stream, uint64_t bytes);
void task_forget(uint32_t id);
void tasks_resume(void);

/* requests.c */
bool on_frame(const uint8_t *frame, size_t payload);

/* dispatcher.c */
extern int epoll_fd;
extern bool host_gone, shutting_down;
void begin_shutdown(uint32_t grace_ms);
void protocol_error(const char *message);
void send_error(uint32_t task, enum error_code code, int error, const char *message);
bool watch(int fd, uint32_t events, void *data);
void rewatch(int fd, uint32_t events, void *data);
int dispatch(int in, int out, int host_pidfd);

#endif
