#include <gloo/declarations.h>
