-- The catalog of leasehold: tables and views in schema leasehold, functions in the schema that
-- CREATE EXTENSION chose.
--
-- Functions are PARALLEL UNSAFE: they change shared memory or look under a fresh snapshot.

CREATE SCHEMA leasehold;
GRANT USAGE ON SCHEMA leasehold TO PUBLIC;

-- One row per resource: its T_max and its last durable lease. Written by grants, never by hand.
-- The fill factor leaves room for new versions of a row in its page (HOT updates). No CHECK constraints:
-- PostgreSQL parses their expressions anew for each statement, which is a tenth of what a grant costs.
CREATE TABLE leasehold.ledger (
    resource   text COLLATE "C" PRIMARY KEY,
    token      bigint NOT NULL,
    ttl_us     bigint NOT NULL,
    released   boolean NOT NULL,
    system     bigint NOT NULL,
    database   oid NOT NULL,
    holder     text NOT NULL,
    role       oid NOT NULL,
    granted_at timestamptz NOT NULL
) WITH (fillfactor = 50);

COMMENT ON TABLE leasehold.ledger IS 'durable: one row per resource, its highest token and its last lease';
COMMENT ON COLUMN leasehold.ledger.token IS 'T_max: the highest token granted for the resource';
COMMENT ON COLUMN leasehold.ledger.ttl_us IS 'longest TTL of that lease, microseconds';
COMMENT ON COLUMN leasehold.ledger.system IS 'system identifier of the cluster that granted it';
COMMENT ON COLUMN leasehold.ledger.database IS 'database that granted it';

CREATE SEQUENCE leasehold.token_seq AS bigint NO CYCLE;

-- The T_max of a resource and the position of the tokens go into a dump.
SELECT pg_catalog.pg_extension_config_dump('leasehold.ledger', '');
SELECT pg_catalog.pg_extension_config_dump('leasehold.token_seq', '');

CREATE FUNCTION leasehold.home(OUT system bigint, OUT database oid, OUT timeline bigint)
RETURNS SETOF record LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_home';
REVOKE ALL ON FUNCTION leasehold.home() FROM PUBLIC;

-- The server that wrote the ledger: tells a restart from a promotion and from a copy. Not dumped: a
-- restored dump has a row of its own, from its CREATE EXTENSION.
CREATE TABLE leasehold.server (
    single     boolean PRIMARY KEY DEFAULT true CHECK (single),
    system     bigint NOT NULL,
    database   oid NOT NULL,
    timeline   bigint NOT NULL,
    lost_up_to bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

COMMENT ON COLUMN leasehold.server.lost_up_to IS 'leases of tokens up to this one were lost with a promotion';

INSERT INTO leasehold.server (system, database, timeline) SELECT system, database, timeline FROM leasehold.home();

CREATE FUNCTION acquire_lease(resource text, holder text DEFAULT NULL, ttl interval DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_acquire_lease';

CREATE FUNCTION renew_lease(resource text, token bigint, ttl interval DEFAULT NULL)
RETURNS boolean LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_renew_lease';

CREATE FUNCTION release_lease(resource text, token bigint)
RETURNS boolean LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_release_lease';

CREATE FUNCTION fence(resource text, token bigint)
RETURNS void LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_fence';

CREATE FUNCTION check_fence(resource text, token bigint)
RETURNS boolean LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_check_fence';

CREATE FUNCTION fenced()
RETURNS trigger LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_fenced';

CREATE FUNCTION fence_table(target regclass, resource text, token_column name DEFAULT NULL, strict boolean DEFAULT false)
RETURNS void LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'leasehold_fence_table';

CREATE FUNCTION unfence_table(target regclass)
RETURNS void LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'leasehold_unfence_table';

CREATE TYPE leasehold.lease AS (
    resource   text,
    token      bigint,
    holder     text,
    state      text,
    ttl        interval,
    remaining  interval,
    granted_at timestamptz,
    renewed_at timestamptz,
    role       regrole,
    pid        integer,
    durable    boolean,
    writers    integer
);

CREATE FUNCTION lease_info(resource text)
RETURNS SETOF leasehold.lease LANGUAGE c VOLATILE ROWS 1 AS 'MODULE_PATHNAME', 'leasehold_lease_info';

CREATE FUNCTION leasehold.all_leases()
RETURNS SETOF leasehold.lease LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_all_leases';

CREATE VIEW leasehold.leases AS SELECT * FROM leasehold.all_leases();
GRANT SELECT ON leasehold.leases TO PUBLIC;
