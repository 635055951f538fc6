/* Written by validation/functions/coefficients.py: constants and minimax polynomials, lowest power first. */
#ifndef PORTABLE_COEFFICIENTS_H
#define PORTABLE_COEFFICIENTS_H
#include <stdint.h>

/* The unevaluated sum of two fp64 numbers, |low| <= ulp(high) / 2. */
typedef struct {
    double high, low;
} double_double;

#define LN2_FP32_0 0x1.62e4p-1f
#define LN2_FP32_1 0x1.7f7d1cp-20f
#define LN2_WIDE_0 0x1.62e42fefa2p-1
#define LN2_WIDE_1 0x1.9ef35793c7673p-41
#define PI_2_WIDE_0 0x1.921fb5p+0
#define PI_2_WIDE_1 0x1.110b46p-26
#define PI_2_WIDE_2 0x1.1a62633145c07p-54
#define LN2_FP64_HIGH 0x1.62e42fefa2p-1 /* 40 bits: times an exponent it is exact */
#define LOG2_E_FP32 0x1.715476p+0f
#define LN2_FP64_REST_HIGH 0x1.9ef35793c7673p-41
#define LN2_FP64_REST_LOW 0x1.f97b57a079a19p-103
#define LN2_HIGH 0x1.62e42fefa39efp-1
#define LN2_LOW 0x1.abc9e3b39803fp-56
#define LOG2_E_HIGH 0x1.71547652b82fep+0
#define LOG2_E_LOW 0x1.777d0ffda0d24p-56
#define LOG10_E_HIGH 0x1.bcb7b1526e50ep-2
#define LOG10_E_LOW 0x1.95355baaafad3p-57
#define LOG10_2_HIGH 0x1.34413509f79ffp-2
#define LOG10_2_LOW -0x1.9dc1da994fd21p-59
#define PI_2_HIGH 0x1.921fb54442d18p+0
#define PI_2_LOW 0x1.1a62633145c07p-54
#define ROOT_HALF_HIGH 0x1.6a09e667f3bcdp-1
#define ROOT_HALF_LOW -0x1.bdd3413b26456p-55
#define ROOT_1_2PI_HIGH 0x1.9884533d43651p-2
#define ROOT_1_2PI_LOW -0x1.cbc0d30ebfd15p-56
#define GELU_SCALE_HIGH 0x1.9884533d43651p+0
#define GELU_SCALE_LOW -0x1.cbc0d30ebfd15p-54
#define GELU_CUBE_HIGH 0x1.2444f2a4d8b4bp-4
#define GELU_CUBE_LOW -0x1.6c843a29d1c7p-61
#define LN2_PAIR_FP32_HIGH 0x1.62e43p-1f
#define LN2_PAIR_FP32_LOW -0x1.05c61p-29f

/* (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, error 2^-34.3 */
static const float EXP_FP32[6] = {
    0x1p-1f,
    0x1.555556p-3f,
    0x1.55548p-5f,
    0x1.11107cp-7f,
    0x1.6d9736p-10f,
    0x1.a1b8f8p-13f,
};

/* (log(1 + f) - f) / f^2 for sqrt(1/2) <= 1 + f <= sqrt 2, error 2^-27.8 */
static const float LOG_FP32[9] = {
    -0x1.fffff8p-2f,
    0x1.555544p-2f,
    -0x1.000404p-2f,
    0x1.99a986p-3f,
    -0x1.5430ecp-3f,
    0x1.220e6cp-3f,
    -0x1.0e8daep-3f,
    0x1.0a6df2p-3f,
    -0x1.40777ep-4f,
};

/* (tanh x - x) / x^3 in x^2, |x| <= 1, error 2^-30.7 */
static const float TANH_FP32[8] = {
    -0x1.555556p-2f,
    0x1.1110fp-3f,
    -0x1.ba0d8ap-5f,
    0x1.65718ep-6f,
    -0x1.1bcc0ep-7f,
    0x1.9d6224p-9f,
    -0x1.d0a3eap-11f,
    0x1.15d646p-13f,
};

/* (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, error 2^-51.6 */
static const double EXP_WIDE[9] = {
    0x1.000000000000ep-1,
    0x1.555555555056ap-3,
    0x1.555555554ebe1p-5,
    0x1.1111112620d67p-7,
    0x1.6c16c18a7e985p-10,
    0x1.a0198be164c5dp-13,
    0x1.a019893a5c9bp-16,
    0x1.72eaa9bbfa8d6p-19,
    0x1.28bc7ec5cb96p-22,
};

/* (log m - 2 s) / s^3 in s^2, s = (m - 1) / (m + 1), sqrt(1/2) <= m <= sqrt 2, error 2^-58.5 */
static const double LOG_WIDE[7] = {
    0x1.5555555555593p-1,
    0x1.999999997fb5ap-2,
    0x1.2492494215c17p-2,
    0x1.c71c51e94b70fp-3,
    0x1.746645ee0c245p-3,
    0x1.39a0fac23991p-3,
    0x1.2f0d5900ff8b2p-3,
};

/* erf(x) / x in x^2, |x| <= 1, error 2^-45.6 */
static const double ERF_WIDE[10] = {
    0x1.20dd750429b1bp+0,
    -0x1.812746b027855p-2,
    0x1.ce2f2197e53cep-4,
    -0x1.b82ce1628d35dp-6,
    0x1.565ba0bd05ea9p-8,
    -0x1.c0287772111ap-11,
    0x1.f9424a933ec1fp-14,
    -0x1.f074790ff3153p-17,
    0x1.9af1571cae6f2p-20,
    -0x1.c1dda9b4188a8p-24,
};

/* (1 + 2 z) e^(z^2) erfc(z) in t = (z - 15/4) / (z + 15/4), 0 <= z <= 12, error 2^-37.8 */
static const double ERFCX_WIDE[15] = {
    0x1.3ccda0b5da581p+0,
    -0x1.1f367684343a8p-3,
    0x1.d5f28ce93cf29p-9,
    0x1.510169d6e7c1cp-4,
    -0x1.bda9282da62acp-4,
    0x1.7a141d48f18e3p-4,
    -0x1.e0d1d629f8956p-5,
    0x1.d0ae2258d1589p-6,
    -0x1.3f4c95e36b7b4p-7,
    0x1.cd3bf456c74d4p-10,
    0x1.2e7e88955bb91p-12,
    -0x1.3ea0c9ee0a253p-12,
    0x1.aab671e17c26dp-15,
    0x1.4c1eab02613b4p-15,
    0x1.1336bcc7292e9p-19,
};

/* (sin r - r) / r^3 in r^2, |r| <= pi / 4, error 2^-47.6 */
static const double SIN_WIDE[5] = {
    -0x1.5555555552397p-3,
    0x1.1111110c9b156p-7,
    -0x1.a019f94fc661dp-13,
    0x1.71d776f49bfdcp-19,
    -0x1.a9649db9731e8p-26,
};

/* (cos r - 1 + r^2 / 2) / r^4 in r^2, |r| <= pi / 4, error 2^-53.5 */
static const double COS_WIDE[5] = {
    0x1.55555555530b7p-5,
    -0x1.6c16c167622ccp-10,
    0x1.a019fa9fc28dep-16,
    -0x1.27e025a31a7ccp-22,
    0x1.1bc62b4769405p-29,
};

/* (e^r - 1 - r - r^2 / 2) / r^3 for |r| <= ln 2 / 2, error 2^-70.0 */
static const double EXP_FP64[11] = {
    0x1.5555555555555p-3,
    0x1.5555555555558p-5,
    0x1.1111111111114p-7,
    0x1.6c16c16c15019p-10,
    0x1.a01a01a017a44p-13,
    0x1.a01a01ad75f7ap-16,
    0x1.71de3a6231d05p-19,
    0x1.27e4cc2335625p-22,
    0x1.ae640f8b2ed4p-26,
    0x1.1f8bc34c62eedp-29,
    0x1.61e8f9916a064p-33,
};

/* (sin r - r) / r^3 in r^2, |r| <= pi / 4, error 2^-79.9 */
static const double SIN_FP64[8] = {
    -0x1.5555555555555p-3,
    0x1.1111111111111p-7,
    -0x1.a01a01a01a015p-13,
    0x1.71de3a556bc37p-19,
    -0x1.ae64567daeafep-26,
    0x1.61245eed3d49fp-33,
    -0x1.ae7b82b857fe8p-41,
    0x1.91ea9a72669fcp-49,
};

/* (cos r - 1 + r^2 / 2) / r^4 in r^2, |r| <= pi / 4, error 2^-75.2 */
static const double COS_FP64[7] = {
    0x1.5555555555555p-5,
    -0x1.6c16c16c16c1p-10,
    0x1.a01a01a018dc3p-16,
    -0x1.27e4fb75fac1bp-22,
    0x1.1eed8ca087b5cp-29,
    -0x1.9393349d9e324p-37,
    0x1.aac400047e641p-45,
};

/* (1 + 2 z) e^(z^2) erfc(z) in t = (z - 15/4) / (z + 15/4), 0 <= z <= 28, error 2^-70.5 */
static const double_double ERFCX_FP64[29] = {
    {0x1.3ccda0b5d5dc2p+0, 0x1.e65b7f651f88ep-54},
    {-0x1.1f367683f89a7p-3, 0x1.8814917eab3dbp-59},
    {0x1.d5f2948159cffp-9, 0x1.331c8c8496995p-63},
    {0x1.510169d096803p-4, 0x1.580f60cd65e4dp-58},
    {-0x1.bda9309a28834p-4, 0x1.a7e9dabb2cff3p-59},
    {0x1.7a14188a99b15p-4, 0x1.cfccb110b510cp-58},
    {-0x1.e0d0fa6e025e9p-5, -0x1.6dcb358cd5131p-59},
    {0x1.d0b0037dcd0b7p-6, -0x1.85a04909f79b2p-63},
    {-0x1.3f603c3350ac9p-7, -0x1.527b4fa32b382p-61},
    {0x1.cc3a0e21d87eep-10, -0x1.fbe0f1c8427a1p-66},
    {0x1.33fb2406da092p-12, -0x1.20137cdfcddd4p-66},
    {-0x1.303f9d8ba95cfp-12, -0x1.16faf6412cfaap-66},
    {0x1.b1445814397a5p-15, -0x1.53f2a33acfbb6p-69},
    {0x1.778a292a69ap-16, 0x1.6d2443ba57d84p-70},
    {-0x1.80097289bb8f6p-17, -0x1.7c5cfe863a0bep-72},
    {-0x1.05260e607733cp-20, 0x1.5b6995cb8e7eap-76},
    {0x1.d6c820ba68c43p-20, 0x1.86119da246a33p-75},
    {-0x1.f41f0dc2de12dp-25, -0x1.f4ba714353c38p-79},
    {-0x1.19120ef567733p-22, -0x1.1f0c16ca7a6cfp-76},
    {0x1.9f3fd89c77d9p-26, 0x1.16d487c15aaefp-80},
    {0x1.665e75ba20abdp-25, 0x1.f2142683a64c2p-80},
    {-0x1.1fe8d4421d761p-28, 0x1.16237fa5eaaffp-82},
    {-0x1.eaecb41302004p-28, -0x1.0135f1f11d6efp-82},
    {0x1.7826eb214b731p-32, 0x1.fb7cc40968109p-86},
    {0x1.47168246a49c1p-30, -0x1.0d8b3dc17a22ep-88},
    {0x1.61df6fda48528p-34, -0x1.e9aad081a278fp-90},
    {-0x1.2f486b96f0dd5p-33, -0x1.d4e7fb5752f59p-87},
    {-0x1.079233fc58ecp-35, 0x1.0a63d09862449p-89},
    {0x1.1f632577ae22fp-40, 0x1.49ce9234a9b3fp-95},
};

/* erf(x) / x in x^2, |x| <= 1, error 2^-74.7 */
static const double_double ERF_FP64[15] = {
    {0x1.20dd750429b6dp+0, 0x1.1ae3812b09a46p-56},
    {-0x1.812746b0379e7p-2, 0x1.ee9fa387e3735p-57},
    {0x1.ce2f21a042be2p-4, -0x1.7acc0dec0669dp-58},
    {-0x1.b82ce31288b47p-6, -0x1.6e19367ccda6dp-60},
    {0x1.565bcd0e6a2f2p-8, -0x1.34a2d7906eb31p-65},
    {-0x1.c02db40035fe5p-11, 0x1.34e62b7c17264p-65},
    {0x1.f9a326f7ae238p-14, 0x1.cfd9abe441b33p-70},
    {-0x1.f4d25bf9daae1p-17, 0x1.fdfcda53827e2p-71},
    {0x1.b9e6c39136037p-20, 0x1.a629681e16754p-74},
    {-0x1.5f73c3df93ea4p-23, 0x1.07a48dc8aefadp-80},
    {0x1.fcbb331d10ad7p-27, -0x1.6aa4e5a167622p-83},
    {-0x1.517ce9b404733p-30, 0x1.f90cdac9fc68ep-84},
    {0x1.9a10008ff998cp-34, 0x1.9dc8c3ab5ac07p-90},
    {-0x1.b40ef3fbfbceap-38, 0x1.e833c3faff886p-92},
    {0x1.3c01b9a51008fp-42, -0x1.dfadb896f781bp-96},
};

/* (log m - 2 s) / s^3 in s^2 by its Taylor series, whose terms from the 17th on are below 2^-86 */
static const double_double LOG_FP64[16] = {
    {0x1.5555555555555p-1, 0x1.5555555555555p-55},
    {0x1.999999999999ap-2, -0x1.999999999999ap-56},
    {0x1.2492492492492p-2, 0x1.2492492492492p-56},
    {0x1.c71c71c71c71cp-3, 0x1.c71c71c71c71cp-57},
    {0x1.745d1745d1746p-3, -0x1.745d1745d1746p-58},
    {0x1.3b13b13b13b14p-3, -0x1.3b13b13b13b14p-57},
    {0x1.1111111111111p-3, 0x1.1111111111111p-59},
    {0x1.e1e1e1e1e1e1ep-4, 0x1.e1e1e1e1e1e1ep-60},
    {0x1.af286bca1af28p-4, 0x1.af286bca1af28p-58},
    {0x1.8618618618618p-4, 0x1.8618618618618p-58},
    {0x1.642c8590b2164p-4, 0x1.642c8590b2164p-59},
    {0x1.47ae147ae147bp-4, -0x1.eb851eb851eb8p-60},
    {0x1.2f684bda12f68p-4, 0x1.2f684bda12f68p-58},
    {0x1.1a7b9611a7b96p-4, 0x1.1a7b9611a7b96p-60},
    {0x1.0842108421084p-4, 0x1.0842108421084p-59},
    {0x1.f07c1f07c1f08p-5, -0x1.f07c1f07c1f08p-60},
};

/* Bits of 2 / pi behind the binary point, after 64 zeros. */
static const uint64_t TWO_OVER_PI[22] = {
    0x0000000000000000u,
    0xa2f9836e4e441529u,
    0xfc2757d1f534ddc0u,
    0xdb6295993c439041u,
    0xfe5163abdebbc561u,
    0xb7246e3a424dd2e0u,
    0x06492eea09d1921cu,
    0xfe1deb1cb129a73eu,
    0xe88235f52ebb4484u,
    0xe99c7026b45f7e41u,
    0x3991d639835339f4u,
    0x9c845f8bbdf9283bu,
    0x1ff897ffde05980fu,
    0xef2f118b5a0a6d1fu,
    0x6d367ecf27cb09b7u,
    0x4f463f669e5fea2du,
    0x7527bac7ebe5f17bu,
    0x3d0739f78a5292eau,
    0x6bfb5fb11f8d5d08u,
    0x56033046fc7b6babu,
    0xf0cfbc209af4361du,
    0xa9e391615ee61b08u,
};

#endif
