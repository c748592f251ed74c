"""Start of the hook, copied to a folder at the front of PYTHONPATH; makes way for the `sitecustomize` that would have run."""

import os
import sys

if __name__ == "sitecustomize":
    if "ORCH_RANK_DIR" in os.environ:
        try:
            from _orch_hook import arm  # type: ignore[import-not-found]

            arm.start()
        except Exception:
            pass  # not even a folder to note it in
    elif "ORCH_LAUNCH_DIR" in os.environ:
        try:
            from _orch_hook import launch

            with open("/proc/self/cmdline", errors="surrogateescape") as file:  # noqa: PTH123
                launch.hand_over(file.read().split("\0")[:-1])
            if launch.REAL_ENV not in os.environ:
                launch.ScriptImports()
        except Exception:
            pass  # a launcher that is seen to start ranks by itself ends the attempt
    # Make way as if the hook had never been loaded; children find it through the environment.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]  # noqa: PTH120
    sys.modules.pop(__name__, None)
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # the next, or the ImportError `site` expects
