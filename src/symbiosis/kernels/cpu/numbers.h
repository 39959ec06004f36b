/* Vectors of float32, and conversions of numbers in memory. */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__)
#define LANES 8
#if __GNUC__ >= 12
#define EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else /* older compilers have no such levels */
#define EVERY_CPU __attribute__((target_clones("fma", "default")))
#endif
#else
#define LANES 4
#define EVERY_CPU
#endif

/* The function of this name for the current NUMBER type. */
#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define OF(name) PASTE(name, NUMBER)

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t UVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t Bits16 __attribute__((vector_size(2 * LANES)));
typedef uint16_t bfloat16;

INLINE Vec load_float(const float *from) {
    Vec found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE void store_float(float *to, Vec numbers) { memcpy(to, &numbers, sizeof numbers); }

INLINE Vec load_bfloat16(const bfloat16 *from) {
#if defined(__aarch64__) /* the compiler would convert one number after the other */
    return (Vec)vshll_n_u16(vld1_u16(from), 16);
#else
    Bits16 bits16;
    memcpy(&bits16, from, sizeof bits16);
    return (Vec)(__builtin_convertvector(bits16, UVec) << 16);
#endif
}

INLINE void store_bfloat16(bfloat16 *to, Vec numbers) { /* to the nearest, ties to even; a NaN stays one */
    UVec bits = (UVec)numbers, nan = (UVec)(numbers != numbers);
    UVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Bits16 bits16 = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Bits16);
    memcpy(to, &bits16, sizeof bits16);
}

INLINE float one_float(const float *from) { return *from; }

INLINE float one_bfloat16(const bfloat16 *from) {
    uint32_t bits = (uint32_t)*from << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

INLINE void put_float(float *to, float number) { *to = number; }

INLINE void put_bfloat16(bfloat16 *to, float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    *to = number != number ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

INLINE float sum_of(Vec x) {
#if LANES == 8
    x += __builtin_shuffle(x, (IVec){4, 5, 6, 7, 0, 1, 2, 3});
    x += __builtin_shuffle(x, (IVec){2, 3, 0, 1, 6, 7, 4, 5});
    x += __builtin_shuffle(x, (IVec){1, 0, 3, 2, 5, 4, 7, 6});
#else
    x += __builtin_shuffle(x, (IVec){2, 3, 0, 1});
    x += __builtin_shuffle(x, (IVec){1, 0, 3, 2});
#endif
    return x[0];
}

/* The sums of as many vectors as one has numbers. */
INLINE Vec sums_of(const Vec *x) {
#if LANES == 8
    Vec pairs[4], fours[2];
    for (int i = 0; i < 4; i++)
        pairs[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], (IVec){0, 8, 2, 10, 4, 12, 6, 14}) +
                   __builtin_shuffle(x[2 * i], x[2 * i + 1], (IVec){1, 9, 3, 11, 5, 13, 7, 15});
    for (int i = 0; i < 2; i++)
        fours[i] = __builtin_shuffle(pairs[2 * i], pairs[2 * i + 1], (IVec){0, 1, 8, 9, 4, 5, 12, 13}) +
                   __builtin_shuffle(pairs[2 * i], pairs[2 * i + 1], (IVec){2, 3, 10, 11, 6, 7, 14, 15});
    return __builtin_shuffle(fours[0], fours[1], (IVec){0, 1, 2, 3, 8, 9, 10, 11}) +
           __builtin_shuffle(fours[0], fours[1], (IVec){4, 5, 6, 7, 12, 13, 14, 15});
#else
    Vec pairs[2];
    for (int i = 0; i < 2; i++)
        pairs[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], (IVec){0, 4, 2, 6}) +
                   __builtin_shuffle(x[2 * i], x[2 * i + 1], (IVec){1, 5, 3, 7});
    return __builtin_shuffle(pairs[0], pairs[1], (IVec){0, 1, 4, 5}) + __builtin_shuffle(pairs[0], pairs[1], (IVec){2, 3, 6, 7});
#endif
}

/* exp of numbers that are not positive, accurate to all but the last bit. */
INLINE Vec exp_of(Vec x) {
    const Vec least = (Vec){0} - 87.0f;
    const IVec tiny = x < least;
    x = (Vec)((~tiny & (IVec)x) | (tiny & (IVec)least));
    const IVec power = __builtin_convertvector(x * 1.44269504f - 0.5f, IVec); /* to the nearest, of what is not positive */
    const Vec whole = __builtin_convertvector(power, Vec);
    const Vec rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Vec sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const Vec found = sum * (Vec)((power + 127) << 23);
    return (Vec)(~tiny & (IVec)found);
}
