/* Preloaded into the programs of a session with a fixed clock: the time of day stands at
 * SOURCE_DATE_EPOCH, and random bytes follow from SEED and the process id. It makes runs
 * repeatable and isolates nothing: a program that makes system calls by itself sees the kernel's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t now;
static uint64_t seed, state;
static pid_t owner;

__attribute__((constructor)) static void start(void) {
  const char *epoch = getenv("SOURCE_DATE_EPOCH"), *text = getenv("SEED");
  now = epoch ? strtoll(epoch, NULL, 10) : 0;
  seed = text ? strtoull(text, NULL, 10) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *to) {
  if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE && clock != CLOCK_TAI)
    return syscall(SYS_clock_gettime, clock, to);
  *to = (struct timespec){.tv_sec = now};
  return 0;
}

int timespec_get(struct timespec *to, int base) {
  return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, to) == 0 ? base : 0;
}

int gettimeofday(struct timeval *restrict to, void *restrict zone) {
  (void)zone;
  *to = (struct timeval){.tv_sec = now};
  return 0;
}

time_t time(time_t *to) {
  if (to) *to = now;
  return now;
}

/* splitmix64: https://prng.di.unimi.it/splitmix64.c */
static uint64_t next(void) {
  uint64_t z = __atomic_add_fetch(&state, 0x9e3779b97f4a7c15, __ATOMIC_RELAXED);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

ssize_t getrandom(void *to, size_t size, unsigned int flags) {
  (void)flags;
  if (owner != getpid()) { /* a fork goes on with numbers of its own */
    owner = getpid();
    state = seed * 0xd1342543de82ef95 + owner;
  }
  uint64_t word = 0;
  for (size_t i = 0; i < size; i++, word >>= 8) {
    if (i % 8 == 0) word = next();
    ((unsigned char *)to)[i] = word;
  }
  return size;
}

int getentropy(void *to, size_t size) {
  if (size > 256) {
    errno = EIO;
    return -1;
  }
  return getrandom(to, size, 0) < 0;
}
