// Scalar functions of the Program IR, written so that loops over them vectorize. fp32, errors of a
// few ulp.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace blink::cpu {

// Cephes' expf: 2^n * P(r), |r| <= ln 2 / 2. Below -87.3 the result is 0 (no denormals), above 88.7
// inf.
inline float exp_f32(float x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kHigh = 0.693359375f;
  constexpr float kLow = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < -87.3f ? -87.3f : (x > 88.72f ? 88.72f : x);
  const float shifted = clamped * kLog2e + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * kHigh) - n * kLow;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // n may be 128, whose power alone overflows: scale in two halves.
  const int32_t exponent = static_cast<int32_t>(n);
  const int32_t half = exponent >> 1;
  const float scale_a = std::bit_cast<float>((half + 127) << 23);
  const float scale_b = std::bit_cast<float>((exponent - half + 127) << 23);
  float y = p * scale_a * scale_b;
  y = x < -87.3f ? 0.0f : y;
  y = x > 88.72f ? INFINITY : y;
  return x != x ? x : y;
}

inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

// Cephes' tanhf: odd polynomial near 0, else through exp.
inline float tanh_f32(float x) {
  const float a = x < 0.0f ? -x : x;
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float near = p * z * x + x;
  const float e = exp_f32(2.0f * (a > 44.0f ? 44.0f : a));
  const float magnitude = 1.0f - 2.0f / (e + 1.0f);
  const float far = x < 0.0f ? -magnitude : magnitude;
  const float y = a < 0.625f ? near : far;
  return x != x ? x : y;
}

// Rational approximation of erf on [-4, 4] (the one of Eigen's generic_fast_erf_float).
inline float erf_f32(float x) {
  const float c = x < -4.0f ? -4.0f : (x > 4.0f ? 4.0f : x);
  const float z = c * c;
  float p = -2.72614225801306e-10f;
  p = p * z + 2.77068142495902e-08f;
  p = p * z - 2.10102402082508e-06f;
  p = p * z - 5.69250639462346e-05f;
  p = p * z - 7.34990630326855e-04f;
  p = p * z - 2.95459980854025e-03f;
  p = p * z - 1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * z - 2.13374055278905e-04f;
  q = q * z - 1.68282697438203e-03f;
  q = q * z - 7.37332916720468e-03f;
  q = q * z - 1.42647390514189e-02f;
  const float y = c * p / q;
  return x != x ? x : y;
}

inline float rsqrt_f32(float x) { return 1.0f / std::sqrt(x); }
inline float min_f32(float a, float b) { return b < a ? b : a; }
inline float max_f32(float a, float b) { return a < b ? b : a; }
inline int32_t min_i32(int32_t a, int32_t b) { return b < a ? b : a; }
inline int32_t max_i32(int32_t a, int32_t b) { return a < b ? b : a; }
inline float sign_f32(float x) { return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : x); }
inline int32_t sign_i32(int32_t x) { return (x > 0) - (x < 0); }

inline float mod_f32(float a, float b) {
  const float rest = std::fmod(a, b);
  return rest != 0.0f && ((rest < 0.0f) != (b < 0.0f)) ? rest + b : rest;
}

inline int32_t mod_i32(int32_t a, int32_t b) {
  if (b == 0) return 0;
  const int32_t rest = a % b;
  return rest != 0 && ((rest < 0) != (b < 0)) ? rest + b : rest;
}

inline int32_t div_i32(int32_t a, int32_t b) { return b == 0 ? 0 : a / b; }
inline int32_t fmod_i32(int32_t a, int32_t b) { return b == 0 ? 0 : a % b; }
inline int32_t pow_i32(int32_t a, int32_t b) {
  return static_cast<int32_t>(std::pow(static_cast<double>(a), static_cast<double>(b)));
}

// An index read from data: negative counts from the end, then held inside [0, limit).
inline int32_t index_i32(int32_t index, int32_t limit) {
  const int32_t wrapped = index < 0 ? index + limit : index;
  return wrapped < 0 ? 0 : (wrapped >= limit ? limit - 1 : wrapped);
}

}  // namespace blink::cpu
