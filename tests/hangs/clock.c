/* A wall clock that is an hour behind once the file named by CLOCK_BACK is there. For LD_PRELOAD; the other clocks are true. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t behind(void)
{
    const char *file = getenv("CLOCK_BACK");
    return file && syscall(SYS_faccessat, AT_FDCWD, file, F_OK) == 0 ? 3600 : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int status = syscall(SYS_clock_gettime, clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec -= behind();
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    int status = syscall(SYS_gettimeofday, now, zone);
    if (status == 0)
        now->tv_sec -= behind();
    return status;
}

time_t time(time_t *told)
{
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    if (told)
        *told = now.tv_sec;
    return now.tv_sec;
}
