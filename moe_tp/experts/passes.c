/* SwiGLU of bf16 rows, forward and backward, in one pass each: bf16 in and out, fp32 between.

   Compiled on the machine by moe_tp/experts/compiled.py; the plain form is SwiGLU in
   moe_tp/experts/activation.py (arXiv:2002.05202, eq. 6). Every row is worked out by one thread in
   one order, so that results depend neither on the number of threads nor on the run. A row of
   gate_up holds F gates, then F ups; 16 numbers are worked out at a time, and the rest of a row as
   if zeros followed. */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef bf16 halves __attribute__((vector_size(2 * LANES)));

INLINE floats all(float x) { return (floats){} + x; }

INLINE floats pick(words mask, floats yes, floats no) {
    return (floats)(((words)yes & mask) | ((words)no & ~mask));
}

/* the first `count` of the numbers at x, zeros after them */
INLINE floats load(const bf16 *x, int64_t count) {
    halves bits = {};
    memcpy(&bits, x, count < LANES ? count * sizeof(bf16) : sizeof bits);
    return (floats)(__builtin_convertvector(bits, words) << 16);
}

/* To nearest, ties to even; NaN stays NaN. The processor's own instruction makes numbers below
   2^-126 zero; it stands here by name because the header of intrinsics takes 0.1 s to compile. */
INLINE halves narrow(floats x) {
#ifdef __AVX512BF16__
    halves rounded;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x));
    return rounded;
#else
    words bits = (words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words nan = (words)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), halves);
#endif
}

INLINE void store(bf16 *y, floats x, int64_t count) {
    halves bits = narrow(x);
    memcpy(y, &bits, count < LANES ? count * sizeof(bf16) : sizeof bits);
}

/* 1 / (1 + exp(-x)), to some 1e-7; exp by a polynomial on [-ln 2 / 2, ln 2 / 2] */
INLINE floats sigmoid(floats x) {
    floats z = -x;
    z = pick((words)(z > 88.0f), all(88.0f), z);
    z = pick((words)(z < -87.0f), all(-87.0f), z);
    /* adding 1.5 * 2^23 rounds to a whole number, which then lies in the low bits */
    floats shifted = z * 1.44269504f + 12582912.0f;
    floats whole = shifted - 12582912.0f;
    floats r = z - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    floats p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    floats scale = (floats)(((words)shifted + 127) << 23);
    return 1.0f / (1.0f + p * scale);
}

/* The lanes of one row from `i` on; `count` is a constant where all of them are there, so that what
   is loaded and stored are whole vectors. */
INLINE void forward_lanes(const bf16 *gate, const bf16 *up, bf16 *out, int64_t i, int64_t count) {
    floats g = load(gate + i, count);
    store(out + i, g * sigmoid(g) * load(up + i, count), count);
}

/* the same backward; returns their terms of the weight's gradient */
INLINE floats backward_lanes(const bf16 *dy, const bf16 *gate, float w, bf16 *out, bf16 *d_gate,
                             int64_t size, int64_t i, int64_t count) {
    floats d = load(dy + i, count), g = load(gate + i, count), u = load(gate + size + i, count);
    floats s = sigmoid(g), silu = g * s, act = silu * u, dw = d * w;
    store(out + i, w * act, count);
    store(d_gate + size + i, dw * silu, count);
    store(d_gate + i, dw * u * (s + silu * (1.0f - s)), count);
    return d * act;
}

/* hidden = silu(gate) * up */
void moe_tp_swiglu(const bf16 *gate_up, bf16 *hidden, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *gate = gate_up + 2 * row * size, *up = gate + size;
        bf16 *out = hidden + row * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) forward_lanes(gate, up, out, i, LANES);
        if (i < size) forward_lanes(gate, up, out, i, size - i);
    }
}

/* Backward of weight * silu(gate) * up: hidden is that value, d_weight the sum over a row of
   grad * silu(gate) * up. */
void moe_tp_swiglu_backward(const bf16 *grad, const bf16 *gate_up, const float *weight,
                            bf16 *hidden, bf16 *d_gate_up, float *d_weight, int64_t rows,
                            int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *dy = grad + row * size, *gate = gate_up + 2 * row * size;
        bf16 *out = hidden + row * size, *d_gate = d_gate_up + 2 * row * size;
        float w = weight[row], sum = 0;
        floats total = {};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            total += backward_lanes(dy, gate, w, out, d_gate, size, i, LANES);
        if (i < size) total += backward_lanes(dy, gate, w, out, d_gate, size, i, size - i);
        for (int lane = 0; lane < LANES; lane++) sum += total[lane];
        d_weight[row] = sum;
    }
}
