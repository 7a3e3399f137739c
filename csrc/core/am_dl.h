/* am_dl.h -- libraries that are found while running: a build needs none of them. */
#ifndef AM_DL_H
#define AM_DL_H

#include "am_status.h"

/* The library `soname`: the one that the process has already (torch's), else the one in `wheel` (a folder beside this
 * package, as NVIDIA's wheels are laid out), else the system's. AM_ERR_UNSUPPORTED, naming `package`, where there is
 * none. */
am_status am_dl_open(void **library, const char *soname, const char *wheel, const char *package);

/* The function `name` of it. */
am_status am_dl_find(void **function, void *library, const char *name);

#endif
