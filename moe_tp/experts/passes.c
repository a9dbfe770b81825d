/* SwiGLU of bf16 rows, forward and backward, in one pass each: bf16 in and out, fp32 between.

   Compiled on the machine by moe_tp/experts/compiled.py; the plain form is SwiGLU in
   moe_tp/experts/activation.py (arXiv:2002.05202, eq. 6). Every row is worked out by one thread in
   one order, so that results depend neither on the number of threads nor on the run. A row of
   gate_up holds F gates, then F ups. */

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float wide(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* to nearest, ties to even; NaN stays NaN */
static inline bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? (bf16)0x7fc0 : (bf16)rounded;
}

/* 1 / (1 + exp(-x)), to some 1e-7; exp by a polynomial on [-ln 2 / 2, ln 2 / 2] */
static inline float sigmoid(float x) {
    float z = -x;
    z = z > 88.0f ? 88.0f : z;
    z = z < -87.0f ? -87.0f : z;
    /* adding 1.5 * 2^23 rounds to a whole number, which then lies in the low bits */
    float shifted = z * 1.44269504f + 12582912.0f;
    float whole = shifted - 12582912.0f;
    float r = z - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return 1.0f / (1.0f + p * scale);
}

/* hidden = silu(gate) * up */
void moe_tp_swiglu(const bf16 *gate_up, bf16 *hidden, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *gate = gate_up + 2 * row * size, *up = gate + size;
        bf16 *out = hidden + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float g = wide(gate[i]);
            out[i] = narrow(g * sigmoid(g) * wide(up[i]));
        }
    }
}

/* Backward of weight * silu(gate) * up: hidden is that value, d_weight the sum over a row of
   grad * silu(gate) * up. */
void moe_tp_swiglu_backward(const bf16 *grad, const bf16 *gate_up, const float *weight,
                            bf16 *hidden, bf16 *d_gate_up, float *d_weight, int64_t rows,
                            int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *dy = grad + row * size, *gate = gate_up + 2 * row * size, *up = gate + size;
        bf16 *out = hidden + row * size, *d_gate = d_gate_up + 2 * row * size;
        bf16 *d_up = d_gate + size;
        float w = weight[row], total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < size; i++) {
            float d = wide(dy[i]), g = wide(gate[i]), u = wide(up[i]), s = sigmoid(g);
            float silu = g * s, act = silu * u, dw = d * w;
            total += d * act;
            out[i] = narrow(w * act);
            d_up[i] = narrow(dw * silu);
            d_gate[i] = narrow(dw * u * (s + silu * (1.0f - s)));
        }
        d_weight[row] = total;
    }
}
