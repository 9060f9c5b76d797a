// Given to the compiler of llama.cpp ahead of its sources. GCC before 14 does not know that
// `_tile_loadconfig` reads 64 bytes, and leaves out what a program stores there just before; the
// first product on tiles (AMX) then ends as an illegal instruction.
#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) \
  asm volatile("ldtilecfg %0" ::"m"(*static_cast<const char(*)[64]>(static_cast<const void*>(config))))
#endif
