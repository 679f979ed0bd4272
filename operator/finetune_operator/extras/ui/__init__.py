"""`finetune ui`: a local page over the runs of a workspace and the jobs of a cluster, read only.

    access    accepted requests: host, origin, token
    reading   files of a workspace: bounded, without following symbolic links
    runs      a workspace's runs as values
    jobs      a cluster's jobs as values, requested in the background
    pages     values -> HTML
    server    requests -> pages

Nothing here writes: not to the workspace, not to a cluster.
"""
