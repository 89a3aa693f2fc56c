-- What every spec leans on; run once in its database, before isolationtester.
--
-- Tokens are large and differ from run to run, so no spec prints one. They are kept in sequences, because a sequence
-- is read and written past transactions: what a session was told stays known after its rollback, and to the others
-- before its commit.

CREATE EXTENSION leasehold;

-- nobody waits for a lock in any spec; who does all the same is soon told so
DO $do$BEGIN EXECUTE format('ALTER DATABASE %I SET lock_timeout = ''3 s''', current_database()); END$do$;

CREATE SEQUENCE token_a;
CREATE SEQUENCE token_b;
CREATE SEQUENCE token_c;

CREATE FUNCTION token(name text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    known bigint;
BEGIN
    EXECUTE format('SELECT last_value FROM %I', 'token_' || name) INTO known;
    RETURN known;
END $$;

-- acquires r, and keeps the token under a name
CREATE FUNCTION take(name text, ttl interval DEFAULT '5min') RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    granted bigint := acquire_lease('r', name, ttl);
BEGIN
    IF granted IS NULL THEN
        RETURN 'not granted';
    END IF;
    PERFORM setval(format('%I', 'token_' || name)::regclass, granted);
    RETURN 'granted';
END $$;

-- a lease that is over when this returns, and that nobody else wanted so far
CREATE FUNCTION take_expired(name text) RETURNS text LANGUAGE sql AS
    $$SELECT take(name, '1 microsecond')$$;

-- waits until a condition on r holds: the end of a lease by time has no event to wait for
CREATE FUNCTION await(condition text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    deadline timestamptz := clock_timestamp() + '30 s';
    holds boolean;
BEGIN
    LOOP
        EXECUTE format($f$SELECT %s FROM lease_info('r')$f$, condition) INTO holds;
        IF holds THEN
            RETURN condition;
        ELSIF clock_timestamp() > deadline THEN
            RAISE EXCEPTION 'waited in vain for %', condition;
        END IF;
        PERFORM pg_sleep(0.005);
    END LOOP;
END $$;

CREATE FUNCTION await_state(wanted text) RETURNS text LANGUAGE sql AS
    $$SELECT await(format('state = %L', wanted))$$;

-- a document that only who holds r may write
CREATE TABLE doc (body text NOT NULL);
INSERT INTO doc VALUES ('as it was');
SELECT fence_table('doc', 'r');

-- all as at first; r stays the same resource, so that tokens go on rising
CREATE FUNCTION begin_again() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM setval('token_a', 1), setval('token_b', 1), setval('token_c', 1);
    PERFORM release_lease(resource, token) FROM leasehold.leases;
    PERFORM set_config('session_replication_role', 'replica', true);
    UPDATE doc SET body = 'as it was';
END $$;
