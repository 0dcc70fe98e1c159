"""Expert placement, batch splitting, request planning and token dispatch for mixture-of-experts serving."""
