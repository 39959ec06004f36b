/* A link between two network namespaces, with delay, rate and loss.

   packet_relay NAMESPACE_A NAMESPACE_B OFFLOAD

   It creates a tun device "link0" in each namespace and forwards packets between the two. Commands on standard input:

   set DELAY_US RATE_BITS LOSS_PPM    for each direction; a rate of 0 is unlimited
   count                              prints, for each direction: packets, wire bytes, lost packets
   seed NUMBER                        of the generator that picks lost packets

   Each command prints one line. With OFFLOAD 1 the kernel hands over packets of up to 64 KiB that a network card would cut
   into segments: their wire bytes count the headers of every segment, and a loss takes all of them. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define BUFFER_BYTES (192u << 20) /* of one direction; 10 Gbit/s for 50 ms are 62 MB */
#define MAX_PACKET (66u << 10)
#define FRAMING_BYTES 38 /* Ethernet: preamble, header, checksum, gap */
#define HEADER_BYTES 52  /* IP and TCP with timestamps */

typedef struct {
    int64_t due_ns;
    uint32_t length;
} entry;

typedef struct {
    int from, to;
    uint8_t *bytes; /* ring of entries, each followed by its packet */
    size_t head, tail, end; /* `end`: where the ring wraps, if tail < head */
    int64_t free_ns;        /* when the link has sent what was given to it */
    uint64_t packets, wire_bytes, lost;
} direction;

static int64_t delay_ns, rate_bits;
static uint32_t loss_ppm;
static uint64_t random_state = 88172645463325252ull;

static void fail(const char *what) {
    fprintf(stderr, "packet_relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static uint64_t next_random(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static int open_device(const char *namespace, int offload) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int net = open(path, O_RDONLY | O_CLOEXEC);
    if (net < 0 || setns(net, CLONE_NEWNET) < 0) fail(path);
    close(net);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) fail("/dev/net/tun");
    struct ifreq request = {0};
    strcpy(request.ifr_name, "link0");
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    if (ioctl(device, TUNSETIFF, &request) < 0) fail("TUNSETIFF");
    if (ioctl(device, TUNSETOFFLOAD, offload ? TUN_F_CSUM | TUN_F_TSO4 : 0) < 0) fail("TUNSETOFFLOAD");
    return device;
}

/* Bytes on the wire, with the headers of every segment. */
static uint64_t wire_bytes_of(const uint8_t *packet, uint32_t length) {
    const struct virtio_net_hdr *header = (const void *)packet;
    uint64_t size = length - sizeof *header, segments = 1;
    if (header->gso_type != VIRTIO_NET_HDR_GSO_NONE && header->gso_size && size > HEADER_BYTES)
        segments = (size - HEADER_BYTES + header->gso_size - 1) / header->gso_size;
    return size + (segments - 1) * HEADER_BYTES + segments * FRAMING_BYTES;
}

static size_t room_for(uint32_t length) {
    return (sizeof(entry) + length + 15) & ~(size_t)15;
}

/* Where the next packet is read to, or NULL if the buffer is full. */
static uint8_t *place_of(direction *d) {
    size_t most = room_for(MAX_PACKET);
    if (d->tail >= d->head) {
        if (d->tail + most <= BUFFER_BYTES) return d->bytes + d->tail;
        if (most >= d->head) return NULL;
        d->end = d->tail;
        d->tail = 0;
    }
    return d->tail + most < d->head ? d->bytes + d->tail : NULL;
}

static void receive(direction *d) {
    uint8_t scratch[64];
    for (int i = 0; i < 64; i++) {
        uint8_t *place = place_of(d);
        if (!place) { /* the buffer is full: this packet is lost */
            if (read(d->from, scratch, sizeof scratch) < 0) return;
            d->lost++;
            continue;
        }
        ssize_t length = read(d->from, place + sizeof(entry), MAX_PACKET);
        if (length <= 0) return;
        uint64_t size = wire_bytes_of(place + sizeof(entry), length);
        d->packets++;
        d->wire_bytes += size;
        if (loss_ppm && next_random() % 1000000 < loss_ppm) {
            d->lost++;
            continue;
        }
        int64_t now = now_ns();
        if (d->free_ns < now) d->free_ns = now;
        if (rate_bits) d->free_ns += (int64_t)(size * 8e9 / rate_bits);
        *(entry *)place = (entry){d->free_ns + delay_ns, (uint32_t)length};
        d->tail += room_for(length);
    }
}

/* Deliver what is due. Returns when the next packet is, or -1. */
static int64_t deliver(direction *d) {
    while (d->head != d->tail) {
        if (d->tail < d->head && d->head == d->end) {
            d->head = 0;
            continue;
        }
        entry *first = (entry *)(d->bytes + d->head);
        if (first->due_ns > now_ns()) return first->due_ns;
        if (write(d->to, first + 1, first->length) < 0) d->lost++;
        d->head += room_for(first->length);
    }
    d->head = d->tail = 0;
    return -1;
}

static void obey(direction *d) {
    char line[256];
    if (!fgets(line, sizeof line, stdin)) exit(0);
    long long delay_us, rate, ppm, seed;
    if (sscanf(line, "set %lld %lld %lld", &delay_us, &rate, &ppm) == 3) {
        delay_ns = delay_us * 1000, rate_bits = rate, loss_ppm = ppm;
        printf("set\n");
    } else if (sscanf(line, "seed %lld", &seed) == 1) {
        random_state = 88172645463325252ull ^ (uint64_t)seed * 0x9E3779B97F4A7C15ull;
        printf("seed\n");
    } else if (strncmp(line, "count", 5) == 0) {
        printf("%lu %lu %lu %lu %lu %lu\n", d[0].packets, d[0].wire_bytes, d[0].lost, d[1].packets, d[1].wire_bytes,
               d[1].lost);
    } else {
        printf("unknown command\n");
    }
    fflush(stdout);
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    int offload = atoi(arguments[3]);
    prctl(PR_SET_TIMERSLACK, 1);
    prctl(PR_SET_PDEATHSIG, 9);
    int a = open_device(arguments[1], offload), b = open_device(arguments[2], offload);
    direction both[2] = {{.from = a, .to = b}, {.from = b, .to = a}};
    for (int i = 0; i < 2; i++)
        if (!(both[i].bytes = malloc(BUFFER_BYTES))) fail("malloc");
    setvbuf(stdin, NULL, _IONBF, 0);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int64_t next = -1;
        for (int i = 0; i < 2; i++) {
            int64_t due = deliver(&both[i]);
            if (due >= 0 && (next < 0 || due < next)) next = due;
        }
        struct pollfd polled[3] = {{a, POLLIN, 0}, {b, POLLIN, 0}, {0, POLLIN, 0}};
        struct timespec wait = {0};
        if (next >= 0) {
            int64_t left = next - now_ns();
            if (left > 0) wait = (struct timespec){left / 1000000000, left % 1000000000};
        }
        if (ppoll(polled, 3, next < 0 ? NULL : &wait, NULL) < 0 && errno != EINTR) fail("poll");
        for (int i = 0; i < 2; i++)
            if (polled[i].revents) receive(&both[i]);
        if (polled[2].revents) obey(both);
    }
}
