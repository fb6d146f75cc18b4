// libtorch's switch for TF32, which tch does not have, for `tf32.rs`.

#include <ATen/Context.h>

extern "C" {

// Whether products of float32 matrices on GPUs may be computed in TF32, from now on, in the whole process.
void elmo_set_tf32(bool allow) {
  at::globalContext().setAllowTF32CuBLAS(allow);
}

bool elmo_tf32() {
  return at::globalContext().allowTF32CuBLAS();
}

} // extern "C"
