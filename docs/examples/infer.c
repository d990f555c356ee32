/* A client of weightd in C, with nothing but libc: asks a model with one FP32 input of shape [1, N] over the unix
 * socket, and prints its outputs. It follows docs/protocol.md.
 *
 *     cc -O2 -o infer infer.c
 *     ./infer /run/weightd/weightd.sock.unix MODEL INPUT 0.5 1.5 ...
 *
 * Status 0: answered. 1: the daemon said an error, or nobody answered. 64: wrong arguments.
 */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    MAX_FRAMES = 66,           /* two of the header, and 64 tensors */
    MAX_RANK = 16,             /* dimensions of a tensor */
    MAX_DEPTH = 16,            /* of a header's maps and lists: the protocol has four */
    MAX_VALUES = 1024,         /* of our input, and printed of each output */
    TIMEOUT_US = 5 * 1000000,  /* of the request; we wait a second longer, for the daemon says more than our watch */
};
#define MAX_HEADER_BYTES ((size_t)65536)
#define MAX_FRAME_BYTES ((uint32_t)1 << 30)

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

/* --- msgpack, as much as a header needs: to write ---------------------------------------------------------------- */

struct writer {
    unsigned char bytes[4096];
    size_t size;
};

static void put(struct writer *to, const void *bytes, size_t size)
{
    if (size > sizeof to->bytes - to->size)
        fail("request", "a name is too long");
    memcpy(to->bytes + to->size, bytes, size);
    to->size += size;
}

static void put_uint(struct writer *to, uint32_t value) /* always in the form of four bytes, which is legal */
{
    unsigned char bytes[] = {0xce, value >> 24 & 255, value >> 16 & 255, value >> 8 & 255, value & 255};
    put(to, bytes, sizeof bytes);
}

static void put_text(struct writer *to, const char *text)
{
    size_t size = strlen(text);
    unsigned char head[] = {0xda, size >> 8 & 255, size & 255};
    put(to, head, sizeof head);
    put(to, text, size <= 65535 ? size : sizeof to->bytes + 1);
}

static void put_map(struct writer *to, unsigned char pairs) { put(to, &(unsigned char){0x80 | pairs}, 1); }

static void put_list(struct writer *to, unsigned char items) { put(to, &(unsigned char){0x90 | items}, 1); }

/* --- and to read: what comes is not trusted ---------------------------------------------------------------------- */

struct reader {
    const unsigned char *at, *end;
};

struct text {
    const char *at;
    size_t size;
};

static void broken(void) { fail("answer", "it does not follow the protocol"); }

static uint64_t take(struct reader *from, unsigned size) /* big-endian, as msgpack is */
{
    uint64_t value = 0;
    if ((size_t)(from->end - from->at) < size)
        broken();
    while (size--)
        value = value << 8 | *from->at++;
    return value;
}

/* A size or a number whose form begins at `first`, with 1, 2, 4 or 8 bytes that follow. */
static uint64_t take_sized(struct reader *from, unsigned char form, unsigned char first)
{
    return take(from, 1u << (form - first));
}

static uint64_t take_map(struct reader *from)
{
    unsigned char form = (unsigned char)take(from, 1);
    if (form >> 4 == 0x8)
        return form & 15;
    if (form != 0xde && form != 0xdf)
        broken();
    return take_sized(from, form, 0xdd);
}

static uint64_t take_list(struct reader *from)
{
    unsigned char form = (unsigned char)take(from, 1);
    if (form >> 4 == 0x9)
        return form & 15;
    if (form != 0xdc && form != 0xdd)
        broken();
    return take_sized(from, form, 0xdb);
}

static struct text take_bytes(struct reader *from, uint64_t size)
{
    struct text text = {(const char *)from->at, (size_t)size};
    if ((uint64_t)(from->end - from->at) < size)
        broken();
    from->at += size;
    return text;
}

static struct text take_text(struct reader *from)
{
    unsigned char form = (unsigned char)take(from, 1);
    if (form >> 5 == 0x5)
        return take_bytes(from, form & 31);
    if (form < 0xd9 || form > 0xdb)
        broken();
    return take_bytes(from, take_sized(from, form, 0xd9));
}

static uint64_t take_uint(struct reader *from)
{
    unsigned char form = (unsigned char)take(from, 1);
    if (form < 0x80)
        return form;
    if (form < 0xcc || form > 0xcf)
        broken();
    return take_sized(from, form, 0xcc);
}

/* Passes over a value of any kind: a later daemon may tell more. */
static void skip(struct reader *from, int depth)
{
    uint64_t count = 0;
    if (from->at == from->end || depth == MAX_DEPTH)
        broken();
    unsigned char form = *from->at;
    if (form >> 5 == 0x5 || (form >= 0xd9 && form <= 0xdb)) {
        take_text(from);
    } else if (form >> 4 == 0x8 || form == 0xde || form == 0xdf) {
        for (count = 2 * take_map(from); count; count--)
            skip(from, depth + 1);
    } else if (form >> 4 == 0x9 || form == 0xdc || form == 0xdd) {
        for (count = take_list(from); count; count--)
            skip(from, depth + 1);
    } else {
        from->at++;
        if (form == 0xca || form == 0xcb) /* floats of 4 and 8 bytes */
            take(from, form == 0xca ? 4 : 8);
        else if (form >= 0xcc && form <= 0xd3) /* integers of 1, 2, 4 and 8 bytes */
            take_sized(from, form, form < 0xd0 ? 0xcc : 0xd0);
        else if (form >= 0x80 && form < 0xe0 && form != 0xc2 && form != 0xc3) /* else a small integer, or a boolean */
            broken();
    }
}

static int is(struct text text, const char *word)
{
    return text.size == strlen(word) && !memcmp(text.at, word, text.size);
}

/* --- messages: how many frames, how long each is, then the frames ------------------------------------------------ */

struct message {
    uint32_t count;
    struct reader frames[MAX_FRAMES];
};

static void write_all(int peer, const void *bytes, size_t size)
{
    for (const char *at = bytes; size;) {
        ssize_t sent = send(peer, at, size, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            fail("send", strerror(errno));
        at += sent;
        size -= (size_t)sent;
    }
}

static void read_all(int peer, void *bytes, size_t size)
{
    for (char *at = bytes; size;) {
        ssize_t got = recv(peer, at, size, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            fail("receive", errno == EAGAIN ? "no answer in time" : strerror(errno));
        if (!got)
            fail("receive", "the daemon has hung up");
        at += got;
        size -= (size_t)got;
    }
}

static void put_le32(unsigned char *to, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        to[i] = value >> 8 * i & 255;
}

static uint64_t take_le(const unsigned char *from, unsigned size)
{
    uint64_t value = 0;
    while (size--)
        value = value << 8 | from[size];
    return value;
}

static void send_message(int peer, const void *const frames[], const size_t sizes[], uint32_t count)
{
    unsigned char head[4 + 4 * MAX_FRAMES];
    put_le32(head, count);
    for (uint32_t i = 0; i < count; i++)
        put_le32(head + 4 + 4 * i, (uint32_t)sizes[i]);
    write_all(peer, head, 4 + 4 * count);
    for (uint32_t i = 0; i < count; i++)
        write_all(peer, frames[i], sizes[i]);
}

static void receive_message(int peer, struct message *message)
{
    unsigned char head[4 * MAX_FRAMES];
    read_all(peer, head, 4);
    message->count = (uint32_t)take_le(head, 4);
    if (message->count < 1 || message->count > MAX_FRAMES)
        broken();
    read_all(peer, head, 4 * message->count);
    for (uint32_t i = 0; i < message->count; i++) {
        uint32_t size = (uint32_t)take_le(head + 4 * i, 4);
        if (size > MAX_FRAME_BYTES || (i < 2 && size > MAX_HEADER_BYTES))
            broken();
        unsigned char *bytes = malloc(size ? size : 1); /* until the process ends, which is soon */
        if (!bytes)
            fail("answer", "no memory");
        read_all(peer, bytes, size);
        message->frames[i] = (struct reader){bytes, bytes + size};
    }
}

/* --- a request --------------------------------------------------------------------------------------------------- */

static void send_infer(int peer, const char *model, const char *input, const float values[], uint32_t count)
{
    struct writer envelope = {.size = 0}, description = {.size = 0};
    static unsigned char tensor[4 * MAX_VALUES];

    put_map(&envelope, 4);
    put_text(&envelope, "v"), put_uint(&envelope, 2);
    put_text(&envelope, "type"), put_text(&envelope, "infer");
    put_text(&envelope, "id"), put_text(&envelope, "1");
    put_text(&envelope, "parameters"), put_map(&envelope, 1);
    put_text(&envelope, "timeout_us"), put_uint(&envelope, TIMEOUT_US);

    put_map(&description, 2);
    put_text(&description, "model_name"), put_text(&description, model);
    put_text(&description, "inputs"), put_list(&description, 1), put_map(&description, 3);
    put_text(&description, "name"), put_text(&description, input);
    put_text(&description, "datatype"), put_text(&description, "FP32");
    put_text(&description, "shape"), put_list(&description, 2);
    put_uint(&description, 1), put_uint(&description, count);

    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        put_le32(tensor + 4 * i, bits);
    }
    const void *frames[] = {envelope.bytes, description.bytes, tensor};
    size_t sizes[] = {envelope.size, description.size, 4 * (size_t)count};
    send_message(peer, frames, sizes, 3);
}

/* --- its answer -------------------------------------------------------------------------------------------------- */

static const struct datatype {
    const char *name;
    char kind;
    unsigned size;
} DATATYPES[] = {
    {"BOOL", 'u', 1}, {"UINT8", 'u', 1}, {"UINT16", 'u', 2}, {"UINT32", 'u', 4}, {"UINT64", 'u', 8}, {"INT8", 'i', 1},
    {"INT16", 'i', 2}, {"INT32", 'i', 4}, {"INT64", 'i', 8}, {"FP16", 'h', 2}, {"FP32", 'f', 4}, {"FP64", 'd', 8},
};

static float of_half(uint64_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent ? (float)(1024 + fraction) : (float)fraction;

    if (exponent == 31)
        value = fraction ? NAN : INFINITY;
    for (int at = exponent ? exponent : 1; at < 25; at++)
        value /= 2;
    for (int at = exponent; at > 25 && exponent < 31; at--)
        value *= 2;
    return bits >> 15 & 1 ? -value : value;
}

static void print_value(const struct datatype *type, uint64_t bits)
{
    uint32_t low = (uint32_t)bits;
    float single;
    double real;

    memcpy(&single, &low, 4);
    memcpy(&real, &bits, 8);
    if (type->kind == 'i')
        printf(" %" PRId64, (int64_t)(bits << (64 - 8 * type->size)) >> (64 - 8 * type->size));
    else if (type->kind == 'u')
        printf(" %" PRIu64, bits);
    else if (type->kind == 'd')
        printf(" %.17g", real);
    else
        printf(" %.9g", type->kind == 'f' ? single : of_half(bits));
}

/* Prints one output, of which `spec` is described and `frame` holds the elements. */
static void print_output(struct reader *spec, struct reader frame)
{
    struct text name = {"", 0}, word = {"", 0};
    uint64_t shape[MAX_RANK], rank = 0, elements = 1;
    const struct datatype *type = NULL;

    for (uint64_t fields = take_map(spec); fields; fields--) {
        struct text key = take_text(spec);
        if (is(key, "name")) {
            name = take_text(spec);
        } else if (is(key, "datatype")) {
            word = take_text(spec);
        } else if (is(key, "shape")) {
            if ((rank = take_list(spec)) > MAX_RANK)
                broken();
            for (uint64_t i = 0; i < rank; i++)
                shape[i] = take_uint(spec);
        } else {
            skip(spec, 0);
        }
    }
    for (size_t i = 0; i < sizeof DATATYPES / sizeof *DATATYPES; i++)
        if (is(word, DATATYPES[i].name))
            type = &DATATYPES[i];
    for (uint64_t i = 0; i < rank; i++)
        if (__builtin_mul_overflow(elements, shape[i], &elements))
            broken();
    if (!type || elements > MAX_FRAME_BYTES || elements * type->size != (uint64_t)(frame.end - frame.at))
        broken();

    printf("%.*s %s [", (int)name.size, name.at, type->name);
    for (uint64_t i = 0; i < rank; i++)
        printf(i ? ", %" PRIu64 : "%" PRIu64, shape[i]);
    printf("]:");
    for (uint64_t i = 0; i < elements && i < MAX_VALUES; i++)
        print_value(type, take_le(frame.at + i * type->size, type->size));
    printf(elements > MAX_VALUES ? " ...\n" : "\n");
}

static int print_answer(struct message *message)
{
    struct text type = {"", 0}, id = {"", 0}, code = {"", 0}, error = {"", 0};
    struct reader *envelope = &message->frames[0], *description = &message->frames[1];

    for (uint64_t fields = take_map(envelope); fields; fields--) {
        struct text key = take_text(envelope);
        if (is(key, "type"))
            type = take_text(envelope);
        else if (is(key, "id"))
            id = take_text(envelope);
        else if (is(key, "code"))
            code = take_text(envelope);
        else if (is(key, "error"))
            error = take_text(envelope);
        else
            skip(envelope, 0);
    }
    if (is(type, "error")) {
        fprintf(stderr, "%.*s: %.*s\n", (int)code.size, code.at, (int)error.size, error.at);
        return 1;
    }
    if (!is(type, "infer_response") || !is(id, "1") || message->count < 2)
        broken();
    for (uint64_t fields = take_map(description); fields; fields--) {
        if (!is(take_text(description), "outputs")) {
            skip(description, 0);
            continue;
        }
        uint64_t outputs = take_list(description);
        if (outputs != message->count - 2)
            broken();
        for (uint64_t i = 0; i < outputs; i++)
            print_output(description, message->frames[2 + i]);
    }
    return 0;
}

static int connected(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {TIMEOUT_US / 1000000 + 1, 0};
    int peer = socket(AF_UNIX, SOCK_STREAM, 0);

    if (peer < 0)
        fail("socket", strerror(errno));
    if (strlen(path) >= sizeof address.sun_path)
        fail(path, "the path is too long for a socket");
    strcpy(address.sun_path, path);
    setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (connect(peer, (struct sockaddr *)&address, sizeof address) < 0)
        fail(path, strerror(errno));
    return peer;
}

int main(int argc, char **argv)
{
    static float values[MAX_VALUES];
    static struct message answer;

    if (argc < 5 || argc - 4 > MAX_VALUES) {
        fprintf(stderr, "usage: %s SOCKET MODEL INPUT VALUE...\n", argv[0]);
        return 64;
    }
    for (int i = 4; i < argc; i++) {
        char *end;
        values[i - 4] = strtof(argv[i], &end);
        if (!*argv[i] || *end) {
            fprintf(stderr, "%s: expected a number\n", argv[i]);
            return 64;
        }
    }
    int peer = connected(argv[1]);
    send_infer(peer, argv[2], argv[3], values, (uint32_t)(argc - 4));
    receive_message(peer, &answer);
    close(peer);
    return print_answer(&answer);
}
