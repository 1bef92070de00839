"""The places: each makes one, puts a warden into it, and hands over a byte stream."""
