#include "am_dl.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* The folder that this package lies in, without a slash at its end; "" where it cannot be told. */
static void beside_package(char *folder, size_t room)
{
    Dl_info self;
    folder[0] = '\0';
    if (dladdr((const void *)(size_t)am_dl_open, &self) == 0 || self.dli_fname == NULL ||
        strlen(self.dli_fname) >= room)
        return;
    memcpy(folder, self.dli_fname, strlen(self.dli_fname) + 1);
    for (int up = 0; up < 2; up++) {
        char *const slash = strrchr(folder, '/');
        if (slash == NULL) {
            folder[0] = '\0';
            return;
        }
        *slash = '\0';
    }
}

am_status am_dl_open(void **library, const char *soname, const char *wheel, const char *package)
{
    char folder[1024], path[1280];
    *library = dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
    if (*library == NULL) {
        beside_package(folder, sizeof folder);
        const int length = snprintf(path, sizeof path, "%s/%s/%s", folder, wheel, soname);
        if (folder[0] && length < (int)sizeof path)
            *library = dlopen(path, RTLD_NOW);
    }
    if (*library == NULL)
        *library = dlopen(soname, RTLD_NOW);
    const char *const why = *library ? "" : dlerror();
    AM_CHECK(*library != NULL, AM_ERR_UNSUPPORTED, "%s was not found (%s): pip install %s", soname, why ? why : "",
             package);
    return AM_OK;
}

am_status am_dl_find(void **function, void *library, const char *name)
{
    *function = dlsym(library, name);
    const char *const why = *function ? "" : dlerror();
    AM_CHECK(*function != NULL, AM_ERR_UNSUPPORTED, "%s was not found (%s): the library is too old", name,
             why ? why : "");
    return AM_OK;
}
