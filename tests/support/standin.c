/* Stand-in for a PJRT plugin: forwards every call to a real plugin, except the calls that a plan lists, which fail, are
 * delayed, hang, or abort the process. tests/support/standin.rs compiles it and writes its plans.
 *
 *   LTX2_STANDIN_PLUGIN   file of the real plugin
 *   LTX2_STANDIN_PLAN     rules separated by ';': FUNCTION[/PROGRAM]@N=ACTION
 *                           FUNCTION  of the C interface, e.g. PJRT_Buffer_ToHostBuffer
 *                           PROGRAM   with PJRT_LoadedExecutable_Execute and PJRT_Client_Compile: counts only calls for the
 *                                     program with this name
 *                           N         number of the call, from 1, or * for every call
 *                           ACTION    fail:CODE:MESSAGE   returns an error with this code
 *                                     delay:MS            forwards the call after this many milliseconds
 *                                     hang                never returns
 *                                     drop                forwards the call; the returned event never becomes ready
 *                                     abort               aborts the process, as a failed CHECK does
 *   LTX2_STANDIN_LOG      file to which each action appends a line when it is taken
 *   LTX2_STANDIN_CALLS    file that gets a line per function when the process ends: its name and number of calls
 *   LTX2_STANDIN_LOAD     fault while loading: abort, hang, major (table of the next major version), old (table of minor
 *                         version 80), tpu (TPU plugin whose initialization never ends), other (client with the platform
 *                         name `other`), or cuda (platform name `cuda`; host memory can be mapped, and destroying the
 *                         client aborts the process if memory is still mapped; programs report that they need no memory,
 *                         because the CPU plugin counts arguments in host memory as arguments on the device)
 *
 * With -DNO_ENTRY it exports nothing, like a library that is not a plugin.
 *
 * slots.h is generated from crates/pjrt/src/abi.rs: SLOTS(X), the functions with name and table slot; SLOT_name, the slot
 * of a table field; AT_Struct_field, the offset of a field in an argument struct; TABLE_HEAD, TABLE_MAJOR, TABLE_SLOTS. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "slots.h"

#ifndef NO_ENTRY

typedef void *(*Function)(void *args);

#define FIELD(type, args, offset) (*(type *)((char *)(args) + (offset)))

/* The real plugin's functions by table slot. */
static Function real[TABLE_SLOTS];

/* ---- Objects of the stand-in among the plugin's: errors, and events that never become ready. ---- */

struct Own {
    struct Own *next;
    int code;            /* of an error */
    const char *message; /* of an error */
    void *event;         /* of an event: the real event */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct Own *all;

static struct Own *add(int code, const char *message, void *event) {
    struct Own *own = calloc(1, sizeof *own);
    own->code = code, own->message = message, own->event = event;
    pthread_mutex_lock(&lock);
    own->next = all, all = own;
    pthread_mutex_unlock(&lock);
    return own;
}

/* Returns the object if it is one of the stand-in; with `take`, removes it from the list. */
static struct Own *find(void *object, int take) {
    pthread_mutex_lock(&lock);
    struct Own **at = &all;
    while (*at && (void *)*at != object) at = &(*at)->next;
    struct Own *own = *at;
    if (own && take) *at = own->next;
    pthread_mutex_unlock(&lock);
    return own;
}

/* ---- The plan. ---- */

enum Action { FAIL, DELAY, HANG, DROP, ABORT };

struct Rule {
    struct Rule *next;
    int slot;
    const char *text, *program;
    long nth; /* 0 for every call */
    atomic_long calls;
    enum Action action;
    long number; /* code or milliseconds */
    const char *message;
};

static struct Rule *rules;

static const struct { const char *name; int slot; } slots[] = {
#define NAMED(name, slot) {#name, slot},
    SLOTS(NAMED)
};

/* Returns the text up to the next `end`, which is replaced by NUL; NULL if there is none. */
static char *word(char **rest, char end) {
    char *start = *rest, *found = strchr(start, end);
    if (!found) return NULL;
    *found = 0, *rest = found + 1;
    return start;
}

static int read_rule(char *text) {
    struct Rule *rule = calloc(1, sizeof *rule);
    rule->text = strdup(text);
    char *function = word(&text, '@'), *nth = function ? word(&text, '=') : NULL;
    if (!nth) return 0;
    rule->nth = strcmp(nth, "*") ? atol(nth) : 0;
    char *program = strchr(function, '/');
    if (program) *program = 0, rule->program = program + 1;
    rule->slot = -1;
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++)
        if (!strcmp(slots[i].name, function)) rule->slot = slots[i].slot;
    if (rule->slot < 0) return 0;
    if (!strncmp(text, "fail:", 5)) {
        text += 5;
        char *code = word(&text, ':');
        if (!code) return 0;
        rule->action = FAIL, rule->number = atol(code), rule->message = text;
    } else if (!strncmp(text, "delay:", 6)) {
        rule->action = DELAY, rule->number = atol(text + 6);
    } else if (!strcmp(text, "hang")) {
        rule->action = HANG;
    } else if (!strcmp(text, "drop")) {
        rule->action = DROP;
    } else if (!strcmp(text, "abort")) {
        rule->action = ABORT;
    } else {
        return 0;
    }
    rule->next = rules, rules = rule;
    return 1;
}

static int read_plan(void) {
    const char *given = getenv("LTX2_STANDIN_PLAN");
    if (!given || !*given) return 1;
    char *rest = strdup(given), *end;
    do {
        end = strchr(rest, ';');
        if (end) *end = 0;
        if (!read_rule(rest)) {
            fprintf(stderr, "stand-in: invalid rule '%s' in LTX2_STANDIN_PLAN\n", rest);
            return 0;
        }
        rest = end + 1;
    } while (end);
    return 1;
}

/* Returns whether a program to be compiled has this name: the first symbol of its text. */
static int compiles(void *args, const char *name) {
    void *program = FIELD(void *, args, AT_ClientCompileArgs_program);
    const char *text = FIELD(const char *, program, AT_Program_code), *symbol = strchr(text, '@');
    size_t size = strlen(name);
    return symbol && !strncmp(symbol + 1, name, size) && strchr(" {(", symbol[1 + size]);
}

/* Returns whether a loaded executable has this name. */
static int is_program(void *loaded, const char *name) {
    char get[AT_LoadedExecutableGetExecutableArgs_SIZE] = {0}, named[AT_ExecutableNameArgs_SIZE] = {0};
    char destroy[AT_ExecutableDestroyArgs_SIZE] = {0};
    FIELD(size_t, get, 0) = sizeof get, FIELD(size_t, named, 0) = sizeof named;
    FIELD(size_t, destroy, 0) = sizeof destroy;
    FIELD(void *, get, AT_LoadedExecutableGetExecutableArgs_loaded_executable) = loaded;
    if (real[SLOT_loaded_executable_get_executable](get)) return 0;
    void *executable = FIELD(void *, get, AT_LoadedExecutableGetExecutableArgs_executable);
    FIELD(void *, named, AT_ExecutableNameArgs_executable) = executable;
    int is = 0;
    if (!real[SLOT_executable_name](named)) {
        const char *text = FIELD(const char *, named, AT_ExecutableNameArgs_executable_name);
        size_t size = FIELD(size_t, named, AT_ExecutableNameArgs_executable_name_size);
        is = size == strlen(name) && !memcmp(text, name, size);
    }
    FIELD(void *, destroy, AT_ExecutableDestroyArgs_executable) = executable;
    real[SLOT_executable_destroy](destroy);
    return is;
}

/* Returns the rule that applies to a call, if any. */
static struct Rule *due(int slot, void *args) {
    for (struct Rule *rule = rules; rule; rule = rule->next) {
        if (rule->slot != slot) continue;
        if (rule->program && slot == SLOT_client_compile && !compiles(args, rule->program)) continue;
        if (rule->program && slot != SLOT_client_compile &&
            !is_program(FIELD(void *, args, AT_LoadedExecutableExecuteArgs_executable), rule->program))
            continue;
        long call = atomic_fetch_add(&rule->calls, 1) + 1;
        if (rule->nth && rule->nth != call) continue;
        const char *path = getenv("LTX2_STANDIN_LOG");
        FILE *log = path ? fopen(path, "a") : NULL;
        if (log) fprintf(log, "%s\n", rule->text), fclose(log);
        return rule;
    }
    return NULL;
}

/* ---- Calls. ---- */

static atomic_long calls[TABLE_SLOTS];

__attribute__((destructor)) static void write_calls(void) {
    const char *path = getenv("LTX2_STANDIN_CALLS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++)
        fprintf(file, "%s %ld\n", slots[i].name, atomic_load(&calls[slots[i].slot]));
    fclose(file);
}

static void wait_for_ever(void) {
    for (;;) pause();
}

/* Returns the offset of the event that a function returns, or 0. */
static int event_of(int slot) {
    switch (slot) {
    case SLOT_client_buffer_from_host_buffer: return AT_ClientBufferFromHostBufferArgs_done_with_host_buffer;
    case SLOT_buffer_to_host_buffer: return AT_BufferToHostBufferArgs_event;
    case SLOT_buffer_ready_event: return AT_BufferReadyEventArgs_event;
    case SLOT_async_host_to_device_transfer_manager_transfer_data:
        return AT_AsyncHostToDeviceTransferManagerTransferDataArgs_done_with_h2d_transfer;
    default: return 0;
    }
}

/* Handles calls on an event that never becomes ready; returns 0 if the event is the plugin's. */
static int own_event(int slot, void *args) {
    int destroys = slot == SLOT_event_destroy;
    if (!destroys && slot != SLOT_event_is_ready && slot != SLOT_event_await && slot != SLOT_event_on_ready) return 0;
    struct Own *own = find(FIELD(void *, args, AT_EventDestroyArgs_event), destroys);
    if (!own) return 0;
    if (destroys) FIELD(void *, args, AT_EventDestroyArgs_event) = own->event;
    if (destroys && own->event) real[slot](args);
    if (slot == SLOT_event_await) wait_for_ever();
    if (slot == SLOT_event_is_ready) FIELD(char, args, AT_EventIsReadyArgs_is_ready) = 0;
    return 1;
}

/* Name that replaces the client's platform name, if any. */
static const char *platform;

/* Number of mapped ranges of host memory, if the stand-in maps memory. */
static int maps;
static atomic_long mapped;

static void *call(int slot, void *args) {
    atomic_fetch_add(&calls[slot], 1);
    struct Rule *rule = due(slot, args);
    if (rule && rule->action == FAIL) return add(rule->number, rule->message, NULL);
    if (rule && rule->action == ABORT) abort();
    if (rule && rule->action == HANG) wait_for_ever();
    if (rule && rule->action == DELAY) {
        struct timespec time = {rule->number / 1000, rule->number % 1000 * 1000000};
        nanosleep(&time, NULL);
    }
    if (slot == SLOT_error_get_code) {
        struct Own *own = find(FIELD(void *, args, AT_ErrorGetCodeArgs_error), 0);
        if (own) return FIELD(int, args, AT_ErrorGetCodeArgs_code) = own->code, NULL;
    }
    if (own_event(slot, args)) return NULL;
    if (maps && slot == SLOT_client_dma_map) return atomic_fetch_add(&mapped, 1), NULL;
    if (maps && slot == SLOT_client_dma_unmap) return atomic_fetch_sub(&mapped, 1), NULL;
    if (slot == SLOT_client_destroy && atomic_load(&mapped)) {
        fprintf(stderr, "stand-in: the client is destroyed while memory is mapped\n");
        abort();
    }
    void *error = real[slot](args);
    if (!error && platform && slot == SLOT_client_platform_name) {
        FIELD(const char *, args, AT_ClientPlatformNameArgs_platform_name) = platform;
        FIELD(size_t, args, AT_ClientPlatformNameArgs_platform_name_size) = strlen(platform);
    }
    if (!error && maps && slot == SLOT_executable_get_compiled_memory_stats)
        memset((char *)args + AT_ExecutableGetCompiledMemoryStatsArgs_generated_code_size_in_bytes, 0,
               AT_ExecutableGetCompiledMemoryStatsArgs_SIZE -
                   AT_ExecutableGetCompiledMemoryStatsArgs_generated_code_size_in_bytes);
    int at = event_of(slot);
    if (!error && at && rule && rule->action == DROP) FIELD(void *, args, at) = add(0, NULL, FIELD(void *, args, at));
    return error;
}

static void *error_destroy(void *args) {
    struct Own *own = find(FIELD(void *, args, AT_ErrorDestroyArgs_error), 1);
    if (!own) return real[SLOT_error_destroy](args);
    free(own);
    return NULL;
}

static void *error_message(void *args) {
    struct Own *own = find(FIELD(void *, args, AT_ErrorMessageArgs_error), 0);
    if (!own) return real[SLOT_error_message](args);
    FIELD(const char *, args, AT_ErrorMessageArgs_message) = own->message;
    FIELD(size_t, args, AT_ErrorMessageArgs_message_size) = strlen(own->message);
    return NULL;
}

#define SHIM(name, slot) \
    static void *shim_##name(void *args) { return call(slot, args); }
SLOTS(SHIM)

static void *initialize_for_ever(void *args) {
    (void)args;
    wait_for_ever();
    return NULL;
}

static void replace(char *table, size_t size, int slot, Function with) {
    size_t at = TABLE_HEAD + slot * sizeof(Function);
    if (at + sizeof(Function) > size || !FIELD(Function, table, at)) return;
    real[slot] = FIELD(Function, table, at);
    FIELD(Function, table, at) = with;
}

const void *GetPjrtApi(void) {
    const char *load = getenv("LTX2_STANDIN_LOAD");
    if (load && !strcmp(load, "abort")) abort();
    if (load && !strcmp(load, "hang")) wait_for_ever();
    const char *path = getenv("LTX2_STANDIN_PLUGIN");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    const void *(*get)(void) = library ? (const void *(*)(void))dlsym(library, "GetPjrtApi") : NULL;
    const void *theirs = get ? get() : NULL;
    if (!theirs) {
        fprintf(stderr, "stand-in: LTX2_STANDIN_PLUGIN is not a plugin: %s\n", path ? path : "not set");
        return NULL;
    }
    if (!read_plan()) return NULL;
    maps = load && !strcmp(load, "cuda");
    platform = maps || (load && !strcmp(load, "other")) ? load : NULL;
    size_t size = FIELD(size_t, theirs, 0);
    char *table = malloc(size);
    memcpy(table, theirs, size);
    if (load && !strcmp(load, "major")) FIELD(int, table, TABLE_MAJOR) += 1;
    if (load && !strcmp(load, "old")) FIELD(int, table, TABLE_MAJOR + sizeof(int)) = 80;
#define INSTALL(name, slot) replace(table, size, slot, shim_##name);
    SLOTS(INSTALL)
    if (load && !strcmp(load, "tpu")) {
        /* PJRT_Extension_Base of type PJRT_Extension_Type_TpuTopology. */
        static struct { size_t size; int type; void *next; } extension = {24, 16, NULL};
        FIELD(void *, table, sizeof(size_t)) = &extension;
        replace(table, size, SLOT_plugin_initialize, initialize_for_ever);
    }
    replace(table, size, SLOT_error_destroy, error_destroy);
    replace(table, size, SLOT_error_message, error_message);
    return table;
}

#endif
